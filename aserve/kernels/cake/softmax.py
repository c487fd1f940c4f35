"""The arithmetic that the kernels of the family share; scores and their sums are in base 2.

They go through keys once, with a running maximum and sum (Milakov and Gimelshein, "Online normalizer calculation for
softmax", 2018), and scale the output so far along with them (Dao et al., "FlashAttention", 2022).
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def cap_scores(products, scale, softcap, HAS_SOFTCAP: tl.constexpr):
    """Cap scores, products of queries and keys times ``scale``, if so wished; ``score_factor`` puts them in base 2."""
    if HAS_SOFTCAP:
        scores = products * scale
        # tanh by an exponential that cannot overflow
        shrunk = tl.exp2(tl.abs(scores) * (-2.0 * LOG2_E / softcap))
        capped = softcap * (1.0 - shrunk) / (1.0 + shrunk)
        return tl.where(scores < 0.0, -capped, capped) * LOG2_E
    else:
        return products


@triton.jit
def score_factor(scale, HAS_SOFTCAP: tl.constexpr):
    """Return what is left to multiply scores with after ``cap_scores``: an exponential does so at no cost."""
    return 1.0 if HAS_SOFTCAP else scale * LOG2_E


@triton.jit
def add_sinks(greatest, total, sinks, heads, is_head):
    """Let each head's sink join its softmax: return the new greatest score, the new total and the old one's weight."""
    sink = tl.load(sinks + heads, mask=is_head, other=0.0).to(tl.float32) * LOG2_E
    joined = tl.maximum(greatest, sink)
    weight = tl.exp2(greatest - joined)
    return joined, total * weight + tl.exp2(sink - joined), weight

"""Triton kernels that choose one token a row in two launches: sums of blocks of the vocabulary, then the token.

A weight is exp((logit - best) / temperature). A row's result depends on that row alone, not on its neighbours.
"""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# mypy: disallow-untyped-calls=False

import triton
import triton.language as tl

BLOCK = 2048  # tokens that one program sums; a draw looks at the sums of all blocks, then at the tokens of one


@triton.jit
def exponent_scale(temperature):
    """What a difference of logits is multiplied by before exp2; a greedy row (temperature 0) counts as 1."""
    divisor = tl.where(temperature > 0, temperature, 1.0).to(tl.float64)
    return (1.4426950408889634 / divisor).to(tl.float32)


@triton.jit
def is_kept(logits, best, temperature, limit):
    """Which logits pass ``limit`` once scaled, with the rounding of plain float32 operations."""
    return tl.div_rn(logits - best, tl.where(temperature > 0, temperature, 1.0)) >= limit


@triton.jit
def load_block(logits, row, block, VOCAB_SIZE: tl.constexpr, ROW_STRIDE: tl.constexpr, BLOCK: tl.constexpr):
    """Return the logits of one block as float32, minus infinity past the end of the vocabulary."""
    ids = block * BLOCK + tl.arange(0, BLOCK)
    at = row.to(tl.int64) * ROW_STRIDE + ids
    return tl.load(logits + at, ids < VOCAB_SIZE, other=float("-inf")).to(tl.float32)


@triton.jit
def load_row_sums(maxima, sums, row, temperature, NUM_BLOCKS: tl.constexpr, NUM_BLOCKS_PADDED: tl.constexpr):
    """Return the best logits of a row's blocks, their sums relative to the row's best logit (float64), and that."""
    blocks = tl.arange(0, NUM_BLOCKS_PADDED)
    at = row.to(tl.int64) * NUM_BLOCKS + blocks
    block_best = tl.load(maxima + at, blocks < NUM_BLOCKS, other=float("-inf"))
    block_sums = tl.load(sums + at, blocks < NUM_BLOCKS, other=0.0)
    best = tl.max(block_best, 0)
    ratio = tl.exp2((block_best - best).to(tl.float64) * exponent_scale(temperature).to(tl.float64))
    return block_best, tl.where(block_sums == 0, 0.0, block_sums.to(tl.float64) * ratio), best


@triton.jit
def is_finite_row(total, best):
    """Whether a token can be chosen: the sum is NaN, infinite or 0 otherwise."""
    return (total > 0) & (total < float("inf")) & (best > float("-inf")) & (best < float("inf"))


@triton.jit(do_not_specialize_on_alignment=["temperatures", "maxima", "sums"])
def sum_blocks(
    logits,  # [N, V], rows ROW_STRIDE apart
    temperatures,  # [N] float32, 0 is greedy
    maxima,  # [N, NUM_BLOCKS] float32, written
    sums,  # [N, NUM_BLOCKS] float32, written
    VOCAB_SIZE: tl.constexpr,
    ROW_STRIDE: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Find one block's best logit and sum its weights relative to that.

    A sum is NaN if a logit is NaN or plus infinity, and 0 if all are minus infinity.
    """
    block, row = tl.program_id(0), tl.program_id(1)
    values = load_block(logits, row, block, VOCAB_SIZE, ROW_STRIDE, BLOCK)
    best = tl.max(values, 0)
    reference = tl.where(best == float("-inf"), 0.0, best)
    weights = tl.exp2((values - reference) * exponent_scale(tl.load(temperatures + row)))
    place = row.to(tl.int64) * NUM_BLOCKS + block
    tl.store(maxima + place, best)
    tl.store(sums + place, tl.sum(weights, 0))


@triton.jit(do_not_specialize_on_alignment=["temperatures", "bests", "limits", "maxima", "sums"])
def sum_kept(
    logits,  # [N, V], rows ROW_STRIDE apart
    temperatures,  # [N] float32
    bests,  # [N] float32, the best logit of each row
    limits,  # [N] float32: the smallest scaled logit that stays; minus infinity leaves the sums as they are
    maxima,  # [N, NUM_BLOCKS] float32
    sums,  # [N, NUM_BLOCKS] float32, written
    VOCAB_SIZE: tl.constexpr,
    ROW_STRIDE: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sum one block's weights again, only those that pass the row's limit: none if it is NaN."""
    block, row = tl.program_id(0), tl.program_id(1)
    temperature, limit = tl.load(temperatures + row), tl.load(limits + row)
    place = row.to(tl.int64) * NUM_BLOCKS + block
    if limit != float("-inf"):
        values = load_block(logits, row, block, VOCAB_SIZE, ROW_STRIDE, BLOCK)
        weights = tl.exp2((values - tl.load(maxima + place)) * exponent_scale(temperature))
        kept = is_kept(values, tl.load(bests + row), temperature, limit)
        tl.store(sums + place, tl.sum(tl.where(kept, weights, 0.0), 0))


@triton.jit(
    do_not_specialize=["pool_stride"],
    do_not_specialize_on_alignment=[
        "temperatures", "uniforms", "limits", "maxima", "sums", "token_ids", "rows", "positions", "pool",
    ],
)  # fmt: skip
def pick_tokens(
    logits,  # [N, V], rows ROW_STRIDE apart
    temperatures,  # [N] float32, 0 is greedy
    uniforms,  # [N] float64 in [0, 1)
    limits,  # [N] float32, with HAS_LIMITS
    maxima,  # [N, NUM_BLOCKS] float32
    sums,  # [N, NUM_BLOCKS] float32
    token_ids,  # [N] int32, written: -1 for a row whose logits are not finite
    rows,  # [N] int32, with HAS_POOL
    positions,  # [N] int32, with HAS_POOL
    pool,  # int32, rows pool_stride apart, written with HAS_POOL: 0 for a row whose logits are not finite
    pool_stride,
    VOCAB_SIZE: tl.constexpr,
    ROW_STRIDE: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    NUM_BLOCKS_PADDED: tl.constexpr,
    HAS_LIMITS: tl.constexpr,
    HAS_POOL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Take the first token whose cumulative weight passes the row's uniform number, or the lowest best one."""
    row = tl.program_id(0)
    temperature = tl.load(temperatures + row)
    scale = exponent_scale(temperature)
    is_greedy = temperature <= 0
    block_best, masses, best = load_row_sums(maxima, sums, row, temperature, NUM_BLOCKS, NUM_BLOCKS_PADDED)
    total = tl.sum(masses, 0)

    blocks = tl.arange(0, NUM_BLOCKS_PADDED)
    target = tl.load(uniforms + row) * total
    # Rounding may leave no sum above the target, and may raise a sum where nothing was added: only blocks
    # and tokens with a weight count, and the last of them is taken if no other is.
    drawn = tl.min(tl.where((tl.cumsum(masses, 0) > target) & (masses > 0), blocks, NUM_BLOCKS_PADDED), 0)
    last = tl.max(tl.where(masses > 0, blocks, 0), 0)
    greedy = tl.min(tl.where(block_best == best, blocks, NUM_BLOCKS - 1), 0)
    block = tl.where(is_greedy, greedy, tl.minimum(drawn, last))
    before = tl.sum(tl.where(blocks < block, masses, 0.0), 0)
    reference = tl.max(tl.where(blocks == block, block_best, float("-inf")), 0)

    ids = block * BLOCK + tl.arange(0, BLOCK)
    values = load_block(logits, row, block, VOCAB_SIZE, ROW_STRIDE, BLOCK)
    weights = tl.exp2((values - reference) * scale)
    if HAS_LIMITS:
        weights = tl.where(is_kept(values, best, temperature, tl.load(limits + row)), weights, 0.0)
    left = (target - before) * tl.exp2((best - reference).to(tl.float64) * scale.to(tl.float64))
    drawn_id = tl.min(tl.where((tl.cumsum(weights.to(tl.float64), 0) > left) & (weights > 0), ids, VOCAB_SIZE), 0)
    last_id = tl.max(tl.where(weights > 0, ids, 0), 0)
    greedy_id = tl.min(tl.where(values == best, ids, VOCAB_SIZE - 1), 0)
    token_id = tl.where(is_greedy, greedy_id, tl.minimum(drawn_id, last_id))

    is_good = is_finite_row(total, best)
    tl.store(token_ids + row, tl.where(is_good, token_id, -1))
    if HAS_POOL:
        at = tl.load(rows + row).to(tl.int64) * pool_stride + tl.load(positions + row)
        tl.store(pool + at, tl.where(is_good, token_id, 0))

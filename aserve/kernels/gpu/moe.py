"""A mixture of experts on a GPU: tokens are sorted by expert, multiplied block by block, and added up by token.

Shapes and grids depend on the number of tokens alone, so that all of it can be captured. Each sum has a fixed order:
the same tokens give the same bits.
"""

from dataclasses import dataclass

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from aserve.kernels.experts import DenseExperts, Experts, Routing, SwiGlu
from aserve.kernels.gpu.launch import FLOATS, can_run, launch_options
from aserve.kernels.gpu.moe_kernels import add_experts, multiply_experts
from aserve.kernels.gpu.moe_launch import MoeLaunch, ProductLaunch, choose_moe_launch
from aserve.kernels.gpu.moe_route_kernels import choose_experts, place_pairs

MAX_EXPERTS = 1024
ROUTE_VALUES = 4096  # scores of a program
MAX_CHUNK_TOKENS = 64
BLOCK_TABLE = 16
BLOCK_CHUNKS = 16
SUM_BLOCK = 512
ALIGNMENT = 16  # bytes, of where the copy engine's rows start
HOPPER = 9
HOPPER_SHARED_BYTES = 227 << 10


@dataclass(frozen=True, slots=True)
class SortedPairs:
    """Pairs of a token and one of its experts, sorted by expert; see ``moe_route_kernels``."""

    weights: Tensor  # [T, k] float32
    order: Tensor  # [T * k] int32, the pairs
    blocks: Tensor  # [3, blocks] int32: expert, first row, end of rows


def can_run_moe(x: Tensor, scores: Tensor, experts: Experts) -> bool:
    """Whether the kernels serve these experts for x [T, hidden]."""
    dense = experts.dense_weights
    if dense is None or not len(x) or experts.routing.num_experts > MAX_EXPERTS:
        return False
    biases = [bias for bias in (dense.gate_up_bias, dense.down_bias) if bias is not None]
    return can_run(x, dense.gate_up, dense.down, *biases) and scores.dtype in FLOATS and scores.is_contiguous()


def run_moe(x: Tensor, scores: Tensor, experts: Experts, overlap: bool, launch: MoeLaunch | None = None) -> Tensor:
    """Return the weighted sum [T, hidden] of each token's experts, see ``can_run_moe``; None: a launch by the table."""
    dense, routing = experts.dense_weights, experts.routing
    assert dense is not None  # the kernels serve no others
    mean_rows = len(x) * routing.experts_per_token / routing.num_experts
    if launch is None:
        launch = choose_moe_launch(mean_rows, x.dtype.itemsize, _shared_bytes(x.device))
    pairs = sort_pairs(scores, routing, launch.block_rows, overlap)
    parts = _apply_experts(x, pairs, dense, experts.swiglu, routing, launch, overlap)
    result = torch.empty_like(x)
    grid = (len(x), triton.cdiv(x.shape[1], SUM_BLOCK))
    add_experts[grid](
        parts,
        pairs.weights,
        result,
        x.shape[1],
        routing.experts_per_token,
        SUM_BLOCK,
        overlap,
        num_warps=4,
        **launch_options(overlap),
    )
    return result


def most_blocks(num_tokens: int, routing: Routing, block_rows: int) -> int:
    """Return how many blocks of one expert's rows there can be."""
    num_pairs = num_tokens * routing.experts_per_token
    return min(num_pairs, num_pairs // block_rows + routing.num_experts)


def sort_pairs(scores: Tensor, routing: Routing, block_rows: int, overlap: bool) -> SortedPairs:
    """Choose experts by scores [T, E] and sort the pairs into blocks of at most ``block_rows``."""
    num_tokens, experts_per_token = len(scores), routing.experts_per_token
    sizes = _route_sizes(routing, overlap)
    num_chunks = triton.cdiv(num_tokens, sizes["BLOCK_TOKENS"])
    num_blocks = most_blocks(num_tokens, routing, block_rows)
    weights = torch.empty(num_tokens, experts_per_token, dtype=torch.float32, device=scores.device)
    order = _integers(scores, num_tokens * experts_per_token)
    blocks = _integers(scores, 3, num_blocks)
    is_alone = num_chunks == 1
    expert_ids, ranks, counts = (
        (None, None, None)
        if is_alone
        else (
            _integers(scores, num_tokens, experts_per_token),
            _integers(scores, num_tokens, experts_per_token),
            _integers(scores, num_chunks, routing.num_experts),
        )
    )
    ends = (order, blocks, num_tokens)
    choose_experts[(num_chunks,)](
        scores,
        expert_ids,
        weights,
        ranks,
        counts,
        *ends,
        num_blocks,
        block_rows,
        IS_RENORMALISED=routing.is_renormalised,
        IS_ALONE=is_alone,
        **sizes,
    )
    if not is_alone:
        place_pairs[(num_chunks,)](
            expert_ids, ranks, counts, *ends, num_chunks, num_blocks, block_rows, BLOCK_CHUNKS=BLOCK_CHUNKS, **sizes
        )
    return SortedPairs(weights, order, blocks)


def _route_sizes(routing: Routing, overlap: bool) -> dict[str, int]:
    """Return the constants and options that both routing kernels take."""
    block_experts = triton.next_power_of_2(routing.num_experts)
    return {
        "NUM_EXPERTS": routing.num_experts,
        "EXPERTS_PER_TOKEN": routing.experts_per_token,
        "BLOCK_TOKENS": max(min(ROUTE_VALUES // block_experts, MAX_CHUNK_TOKENS), 1),
        "BLOCK_EXPERTS": block_experts,
        "BLOCK_RANKS": triton.next_power_of_2(routing.experts_per_token),
        "BLOCK_TABLE": BLOCK_TABLE,
        "OVERLAP": overlap,
        "num_warps": 4,
    } | launch_options(overlap)


def _integers(like: Tensor, *shape: int) -> Tensor:
    return torch.empty(*shape, dtype=torch.int32, device=like.device)


def _apply_experts(
    x: Tensor,
    pairs: SortedPairs,
    dense: DenseExperts,
    swiglu: SwiGlu,
    routing: Routing,
    launch: MoeLaunch,
    overlap: bool,
) -> Tensor:
    """Return [T * k, hidden], what each pair's expert makes of its token."""
    num_pairs, inner = len(pairs.order), dense.down.shape[2]
    hidden = torch.empty(num_pairs, inner, dtype=x.dtype, device=x.device)
    parts = torch.empty(num_pairs, x.shape[1], dtype=x.dtype, device=x.device)
    both = (
        (dense.gate_up, dense.gate_up_bias, x, hidden, launch.gate_up, True),
        (dense.down, dense.down_bias, hidden, parts, launch.down, False),
    )
    for weight, bias, source, result, product, is_gated in both:
        num_outputs, width = result.shape[1], source.shape[1]
        has_descriptor = _has_copy_engine(weight)
        multiply_experts[(triton.cdiv(num_outputs, product.block_outputs), pairs.blocks.shape[1])](
            _describe(weight, product) if has_descriptor else weight,
            source,
            bias,
            result,
            pairs.order,
            pairs.blocks,
            pairs.blocks.shape[1],
            NUM_EXPERTS=routing.num_experts,
            EXPERTS_PER_TOKEN=routing.experts_per_token,
            NUM_OUTPUTS=num_outputs,
            WIDTH=width,
            IS_GATED=is_gated,
            ALPHA=swiglu.alpha,
            LIMIT=swiglu.limit,
            UP_OFFSET=swiglu.up_offset,
            HAS_DESCRIPTOR=has_descriptor,
            IS_EXACT=x.dtype == torch.float32,
            BLOCK_ROWS=launch.block_rows,
            BLOCK_OUTPUTS=product.block_outputs,
            BLOCK_WIDTH=product.block_width,
            OVERLAP=overlap,
            num_warps=product.num_warps,
            num_stages=product.num_stages,
            **launch_options(overlap),
        )
    return parts


def _describe(weight: Tensor, product: ProductLaunch) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(weight.flatten(0, 1), [product.block_outputs, product.block_width])


def _has_copy_engine(weight: Tensor) -> bool:
    """Whether tiles of ``weight`` can come through a descriptor: 16-bit values, rows that start where it can read."""
    is_able = not weight.is_cuda or torch.cuda.get_device_capability(weight.device)[0] >= HOPPER
    row_bytes = weight.shape[-1] * weight.dtype.itemsize
    return is_able and weight.dtype.itemsize == 2 and row_bytes % ALIGNMENT == 0 and weight.data_ptr() % ALIGNMENT == 0


def _shared_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return HOPPER_SHARED_BYTES
    return int(torch.cuda.get_device_properties(device).shared_memory_per_block_optin)  # type: ignore[attr-defined]

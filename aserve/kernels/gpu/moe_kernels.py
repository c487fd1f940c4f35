"""Products of sorted rows with their experts' weights, and the sum of what a token's experts give.

The weight is the left operand, whose tiles have 64 rows where the matrix units want them, so that an expert with few
rows wastes little. It comes through a tensor descriptor where there is a copy engine.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit(do_not_specialize=["num_blocks"])
def multiply_experts(
    weight,
    x,
    bias,
    result,
    order,
    blocks,
    num_blocks,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS_PER_TOKEN: tl.constexpr,
    NUM_OUTPUTS: tl.constexpr,
    WIDTH: tl.constexpr,
    IS_GATED: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    UP_OFFSET: tl.constexpr,
    HAS_DESCRIPTOR: tl.constexpr,
    IS_EXACT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Multiply BLOCK_OUTPUTS rows of one expert's weight with a block of sorted rows; see ``moe_route_kernels``.

    IS_GATED: x [T, width] has the tokens, the weight is [E, 2 * outputs, width], and the gated result [T * k, outputs]
    has the sorted order. Else x [T * k, width] has the sorted order, and result [T * k, outputs] that of the pairs.
    Programs of one block are next to each other, so that its rows are read once from memory.
    """
    block = tl.program_id(1)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    expert = tl.load(blocks + block)
    if expert >= NUM_EXPERTS:
        return
    rows = tl.load(blocks + num_blocks + block) + tl.arange(0, BLOCK_ROWS)
    is_row = rows < tl.load(blocks + 2 * num_blocks + block)
    pairs = tl.load(order + rows, mask=is_row, other=0)
    sources = pairs // EXPERTS_PER_TOKEN if IS_GATED else rows

    output = tl.program_id(0) * BLOCK_OUTPUTS
    row = expert * (NUM_OUTPUTS * 2 if IS_GATED else NUM_OUTPUTS) + output
    num_rows = NUM_OUTPUTS - output  # of the expert's weight, from the program's first on
    source = x + sources[:, None].to(tl.int64) * WIDTH
    sums = tl.zeros([BLOCK_OUTPUTS, BLOCK_ROWS], tl.float32)
    up_sums = tl.zeros([BLOCK_OUTPUTS, BLOCK_ROWS], tl.float32)
    precision: tl.constexpr = "ieee" if IS_EXACT else "tf32"
    for column in range(0, WIDTH, BLOCK_WIDTH):
        columns = column + tl.arange(0, BLOCK_WIDTH)[None, :]
        tokens = tl.load(source + columns, mask=is_row[:, None] & (columns < WIDTH), other=0.0).T
        tile = _load_tile(weight, row, num_rows, column, WIDTH, HAS_DESCRIPTOR, BLOCK_OUTPUTS, BLOCK_WIDTH)
        sums = tl.dot(tile, tokens, sums, input_precision=precision)
        if IS_GATED:
            up_row = row + NUM_OUTPUTS
            tile = _load_tile(weight, up_row, num_rows, column, WIDTH, HAS_DESCRIPTOR, BLOCK_OUTPUTS, BLOCK_WIDTH)
            up_sums = tl.dot(tile, tokens, up_sums, input_precision=precision)

    numbers = tl.arange(0, BLOCK_OUTPUTS)
    if bias is not None:
        sums += tl.load(bias + row + numbers, mask=numbers < num_rows, other=0.0).to(tl.float32)[:, None]
    if IS_GATED:
        if bias is not None:
            up_bias = bias + row + NUM_OUTPUTS
            up_sums += tl.load(up_bias + numbers, mask=numbers < num_rows, other=0.0).to(tl.float32)[:, None]
        sums = _gate(sums, up_sums, ALPHA, LIMIT, UP_OFFSET)
    targets = rows if IS_GATED else pairs
    places = result + targets[:, None].to(tl.int64) * NUM_OUTPUTS + (output + numbers)[None, :]
    tl.store(places, sums.to(result.dtype.element_ty).T, mask=is_row[:, None] & (numbers < num_rows)[None, :])


@triton.jit
def add_experts(
    parts,
    weights,
    result,
    WIDTH: tl.constexpr,
    EXPERTS_PER_TOKEN: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Write the sum of parts [T, k, width] times weights [T, k], the best expert first, to result [T, width]."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    total = tl.zeros([BLOCK], tl.float32)
    for rank in tl.static_range(EXPERTS_PER_TOKEN):
        pair = token * EXPERTS_PER_TOKEN + rank
        part = tl.load(parts + pair * WIDTH + columns, mask=inside, other=0.0).to(tl.float32)
        total += tl.load(weights + pair) * part
    tl.store(result + token * WIDTH + columns, total, mask=inside)


@triton.jit
def _load_tile(
    weight,
    row,
    num_rows,
    column,
    WIDTH: tl.constexpr,
    HAS_DESCRIPTOR: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
):
    """Load [BLOCK_OUTPUTS, BLOCK_WIDTH]; what a descriptor brings of rows behind ``num_rows`` is never stored."""
    if HAS_DESCRIPTOR:
        tile = weight.load([row, column])
    else:
        numbers = tl.arange(0, BLOCK_OUTPUTS)[:, None]
        columns = column + tl.arange(0, BLOCK_WIDTH)[None, :]
        places = weight + (row + numbers).to(tl.int64) * WIDTH + columns
        tile = tl.load(places, mask=(numbers < num_rows) & (columns < WIDTH), other=0.0)
    return tile


@triton.jit
def _gate(gate, up, ALPHA: tl.constexpr, LIMIT: tl.constexpr, UP_OFFSET: tl.constexpr):
    if LIMIT is not None:
        gate = tl.minimum(gate, LIMIT)
        up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
    return gate / (1.0 + tl.exp(-ALPHA * gate)) * (up + UP_OFFSET)

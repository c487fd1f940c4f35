"""The two kernels behind ``medium_linear``: products of tiles on the matrix units, and the sum of what was split.

Weight and ``x`` come through tensor descriptors: the copy engine fills the tiles, with zeros where a tile reaches over
an edge. The weight is the left operand, whose tiles have 64 rows at least, so that few tokens waste nothing.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit(do_not_specialize=["num_tokens", "width"])
def multiply_tiles(
    weight,
    weight_start,
    x,
    bias,
    result,
    num_tokens,
    num_outputs,
    width,
    NUM_STEPS: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    TOKEN_BLOCKS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    IS_GATED: tl.constexpr,
    AHEAD: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Multiply BLOCK_OUTPUTS rows of the weight with TOKEN_BLOCKS times BLOCK_TOKENS tokens, over a part of the width.

    The parts, NUM_STEPS times BLOCK_WIDTH wide, are along the third axis of the grid; part P goes to
    result [parts, T, out]. Programs that share rows of the weight are next to each other, on the first axis.
    ``weight`` and ``x`` are descriptors, ``weight_start`` is where the weight is.
    """
    first_token = tl.program_id(0) * (BLOCK_TOKENS * TOKEN_BLOCKS)
    row = tl.program_id(1) * BLOCK_OUTPUTS
    first_column = tl.program_id(2) * NUM_STEPS * BLOCK_WIDTH
    if OVERLAP:
        gdc_launch_dependents()
        if AHEAD > 0:
            _fetch_ahead(weight_start, row, num_outputs, first_column, width, BLOCK_OUTPUTS, BLOCK_WIDTH, AHEAD)
            if IS_GATED:
                up_start = weight_start + num_outputs.to(tl.int64) * width
                _fetch_ahead(up_start, row, num_outputs, first_column, width, BLOCK_OUTPUTS, BLOCK_WIDTH, AHEAD)
        gdc_wait()

    sums = _zeros(TOKEN_BLOCKS, [BLOCK_OUTPUTS, BLOCK_TOKENS])
    up_sums = _zeros(TOKEN_BLOCKS, [BLOCK_OUTPUTS, BLOCK_TOKENS])
    for step in range(NUM_STEPS):
        column = first_column + step * BLOCK_WIDTH
        tile = weight.load([row, column])
        if IS_GATED:
            up_tile = weight.load([num_outputs + row, column])
        added, up_added = (), ()
        for block in tl.static_range(TOKEN_BLOCKS):
            tokens = x.load([first_token + block * BLOCK_TOKENS, column]).T
            added = _append(added, tl.dot(tile, tokens, sums[block]))
            if IS_GATED:
                up_added = _append(up_added, tl.dot(up_tile, tokens, up_sums[block]))
        sums = added
        if IS_GATED:
            up_sums = up_added

    rows = row + tl.arange(0, BLOCK_OUTPUTS)
    part = result + tl.program_id(2).to(tl.int64) * num_tokens * num_outputs
    for block in tl.static_range(TOKEN_BLOCKS):
        values, up_values = sums[block], up_sums[block]
        if bias is not None:
            values += _load_bias(bias, rows, num_outputs)[:, None]
            if IS_GATED:
                up_values += _load_bias(bias + num_outputs, rows, num_outputs)[:, None]
        if IS_GATED:
            values = _gate(values, up_values)
        tokens = first_token + block * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
        places = part + tokens[:, None].to(tl.int64) * num_outputs + rows[None, :]
        inside = (tokens < num_tokens)[:, None] & (rows < num_outputs)[None, :]
        tl.store(places, values.to(result.dtype.element_ty).T, mask=inside)


@triton.jit(do_not_specialize=["num_tokens"])
def add_parts(
    parts,
    bias,
    result,
    num_tokens,
    num_outputs,
    NUM_PARTS: tl.constexpr,
    IS_GATED: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Add parts [NUM_PARTS, T, rows of the weight], float32, always in the same order; add the bias, gate, round."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < num_outputs
    num_rows = num_outputs * 2 if IS_GATED else num_outputs
    place = parts + token * num_rows + columns
    part_size = num_rows.to(tl.int64) * num_tokens
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    values = _add_columns(place, part_size, inside, NUM_PARTS)
    if bias is not None:
        values += _load_bias(bias, columns, num_outputs)
    if IS_GATED:
        up_values = _add_columns(place + num_outputs, part_size, inside, NUM_PARTS)
        if bias is not None:
            up_values += _load_bias(bias + num_outputs, columns, num_outputs)
        values = _gate(values, up_values)
    tl.store(result + token * num_outputs + columns, values, mask=inside)


@triton.jit
def _fetch_ahead(
    weight, row, num_rows, column, width, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, AHEAD: tl.constexpr
) -> None:
    """Ask for the first AHEAD tiles of a program's rows, to be in the second-level cache when they are loaded.

    Places outside are moved inside: what is fetched in vain does no harm.
    """
    numbers = tl.arange(0, BLOCK_ROWS * AHEAD)
    rows = tl.minimum(row + numbers % BLOCK_ROWS, num_rows - 1)
    columns = tl.maximum(tl.minimum(column + numbers // BLOCK_ROWS * BLOCK_COLUMNS, width - BLOCK_COLUMNS), 0)
    num_bytes = tl.minimum(width, BLOCK_COLUMNS) * (weight.dtype.element_ty.primitive_bitwidth // 8)
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; // dummy $0",
        "=r,l,r",
        [weight + rows.to(tl.int64) * width + columns, num_bytes],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _add_columns(place, part_size, inside, NUM_PARTS: tl.constexpr):
    values = tl.load(place, mask=inside, other=0.0)
    for part in tl.static_range(1, NUM_PARTS):
        values += tl.load(place + part * part_size, mask=inside, other=0.0)
    return values


@triton.jit
def _load_bias(bias, rows, num_rows):
    return tl.load(bias + rows, mask=rows < num_rows, other=0.0).to(tl.float32)


@triton.jit
def _gate(values, up_values):
    return values / (1.0 + tl.exp(-values)) * up_values


@triton.jit
def _append(values, value):
    return values + (value,)  # noqa: RUF005 - Triton has no star in tuples


@triton.jit
def _zeros(NUM: tl.constexpr, SHAPE: tl.constexpr):
    zeros = ()
    for _ in tl.static_range(NUM):
        zeros = _append(zeros, tl.zeros(SHAPE, tl.float32))
    return zeros

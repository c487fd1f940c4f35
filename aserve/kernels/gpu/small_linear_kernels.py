"""The two kernels behind ``small_linear``: a program walks along its rows of the weight, or from rows to rows.

Both multiply a tile of the weight while the next one is under way, and ask for the first before they wait for ``x``.
TOKEN_SLOTS is the number of tokens rounded up to a power of two, so that few variants exist; what belongs to a token
is kept in tuples with one entry a slot.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit(do_not_specialize=["num_tokens"])
def walk_along_rows(
    x,
    residual,
    total,
    gain,
    weight,
    bias,
    result,
    num_tokens,
    eps,
    NUM_OUTPUTS: tl.constexpr,
    WIDTH: tl.constexpr,
    TOKEN_SLOTS: tl.constexpr,
    IS_GATED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """A program takes BLOCK_ROWS outputs, and BLOCK_COLUMNS of the width at a time."""
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    columns = tl.arange(0, BLOCK_COLUMNS)
    up_weight = weight + NUM_OUTPUTS * WIDTH
    if OVERLAP:
        gdc_launch_dependents()
    tile = _load_tile(weight, rows, columns, NUM_OUTPUTS, WIDTH)
    if IS_GATED:
        up_tile = _load_tile(up_weight, rows, columns, NUM_OUTPUTS, WIDTH)
    if OVERLAP:
        gdc_wait()

    sums = _zeros(TOKEN_SLOTS, [BLOCK_ROWS, BLOCK_COLUMNS])
    up_sums = _zeros(TOKEN_SLOTS, [BLOCK_ROWS, BLOCK_COLUMNS])
    squares = _zeros(TOKEN_SLOTS, [BLOCK_COLUMNS])
    for start in range(0, WIDTH, BLOCK_COLUMNS):
        next_tile = _load_tile(weight, rows, start + BLOCK_COLUMNS + columns, NUM_OUTPUTS, WIDTH)
        if IS_GATED:
            next_up_tile = _load_tile(up_weight, rows, start + BLOCK_COLUMNS + columns, NUM_OUTPUTS, WIDTH)
        inputs = _load_inputs(x, residual, total, start + columns, num_tokens, WIDTH, TOKEN_SLOTS)
        if gain is not None:
            squares = _add_squares(squares, inputs, TOKEN_SLOTS)
            inputs = _scale(inputs, gain, start + columns, WIDTH, TOKEN_SLOTS)
        sums = _add_products(sums, tile, inputs, TOKEN_SLOTS)
        tile = next_tile
        if IS_GATED:
            up_sums = _add_products(up_sums, up_tile, inputs, TOKEN_SLOTS)
            up_tile = next_up_tile

    if gain is not None:
        factors = _factors(squares, eps, WIDTH, TOKEN_SLOTS)
    for token in tl.static_range(TOKEN_SLOTS):
        values = tl.sum(sums[token], 1)
        up_values = tl.sum(up_sums[token], 1) if IS_GATED else values
        if gain is not None:
            values, up_values = values * factors[token], up_values * factors[token]
        _store(result, bias, values, up_values, rows, token, num_tokens, NUM_OUTPUTS, IS_GATED)


@triton.jit(do_not_specialize=["num_tokens"])
def walk_from_rows_to_rows(
    x,
    residual,
    total,
    gain,
    weight,
    bias,
    result,
    num_tokens,
    eps,
    NUM_OUTPUTS: tl.constexpr,
    WIDTH: tl.constexpr,
    TOKEN_SLOTS: tl.constexpr,
    IS_GATED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    NUM_STEPS: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """A program holds all of ``x`` in registers and takes NUM_STEPS times BLOCK_ROWS outputs, a grid apart."""
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    columns = tl.arange(0, BLOCK_COLUMNS)
    up_weight = weight + NUM_OUTPUTS * WIDTH
    if OVERLAP:
        gdc_launch_dependents()
    tile = _load_tile(weight, rows, columns, NUM_OUTPUTS, WIDTH)
    if IS_GATED:
        up_tile = _load_tile(up_weight, rows, columns, NUM_OUTPUTS, WIDTH)
    if OVERLAP:
        gdc_wait()

    inputs = _load_inputs(x, residual, total, columns, num_tokens, WIDTH, TOKEN_SLOTS)
    if gain is not None:
        squares = _add_squares(_zeros(TOKEN_SLOTS, [BLOCK_COLUMNS]), inputs, TOKEN_SLOTS)
        factors = _factors(squares, eps, WIDTH, TOKEN_SLOTS)
        inputs = _scale(inputs, gain, columns, WIDTH, TOKEN_SLOTS)
    for _ in range(NUM_STEPS):
        next_rows = rows + tl.num_programs(0) * BLOCK_ROWS
        next_tile = _load_tile(weight, next_rows, columns, NUM_OUTPUTS, WIDTH)
        if IS_GATED:
            next_up_tile = _load_tile(up_weight, next_rows, columns, NUM_OUTPUTS, WIDTH)
        for token in tl.static_range(TOKEN_SLOTS):
            values = tl.sum(tile.to(tl.float32) * inputs[token][None, :], 1)
            up_values = tl.sum(up_tile.to(tl.float32) * inputs[token][None, :], 1) if IS_GATED else values
            if gain is not None:
                values, up_values = values * factors[token], up_values * factors[token]
            _store(result, bias, values, up_values, rows, token, num_tokens, NUM_OUTPUTS, IS_GATED)
        rows, tile = next_rows, next_tile
        if IS_GATED:
            up_tile = next_up_tile


@triton.jit
def _store(
    result, bias, values, up_values, rows, token, num_tokens, NUM_OUTPUTS: tl.constexpr, IS_GATED: tl.constexpr
) -> None:
    """Add the biases, gate, and write the values [rows] of a token."""
    inside = rows < NUM_OUTPUTS
    if bias is not None:
        values += tl.load(bias + rows, mask=inside, other=0.0).to(tl.float32)
        if IS_GATED:
            up_values += tl.load(bias + NUM_OUTPUTS + rows, mask=inside, other=0.0).to(tl.float32)
    if IS_GATED:
        values = values / (1.0 + tl.exp(-values)) * up_values
    tl.store(result + token * NUM_OUTPUTS + rows, values, mask=inside & (token < num_tokens))


@triton.jit
def _load_tile(weight, rows, columns, NUM_ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Load weight[rows, columns], zeros outside; what is read once should push nothing else out of the caches."""
    places = weight + rows[:, None].to(tl.int64) * WIDTH + columns[None, :]
    inside = (rows < NUM_ROWS)[:, None] & (columns < WIDTH)[None, :]
    return tl.load(places, mask=inside, other=0.0, eviction_policy="evict_first")


@triton.jit
def _load_inputs(x, residual, total, columns, num_tokens, WIDTH: tl.constexpr, TOKEN_SLOTS: tl.constexpr):
    """Return a float32 vector a token: x, plus the residual, rounded as stored; the first program stores the sum."""
    inputs = ()
    for token in tl.static_range(TOKEN_SLOTS):
        inside = (columns < WIDTH) & (token < num_tokens)
        values = tl.load(x + token * WIDTH + columns, mask=inside, other=0.0)
        if residual is not None:
            stream = tl.load(residual + token * WIDTH + columns, mask=inside, other=0.0)
            values = (values.to(tl.float32) + stream.to(tl.float32)).to(values.dtype)
            tl.store(total + token * WIDTH + columns, values, mask=inside & (tl.program_id(0) == 0))
        inputs = _append(inputs, values.to(tl.float32))
    return inputs


@triton.jit
def _append(values, value):
    return values + (value,)  # noqa: RUF005 - Triton has no star in tuples


@triton.jit
def _zeros(TOKEN_SLOTS: tl.constexpr, SHAPE: tl.constexpr):
    zeros = ()
    for _ in tl.static_range(TOKEN_SLOTS):
        zeros = _append(zeros, tl.zeros(SHAPE, tl.float32))
    return zeros


@triton.jit
def _add_products(sums, tile, inputs, TOKEN_SLOTS: tl.constexpr):
    wide = tile.to(tl.float32)
    added = ()
    for token in tl.static_range(TOKEN_SLOTS):
        added = _append(added, sums[token] + wide * inputs[token][None, :])
    return added


@triton.jit
def _add_squares(squares, inputs, TOKEN_SLOTS: tl.constexpr):
    added = ()
    for token in tl.static_range(TOKEN_SLOTS):
        added = _append(added, squares[token] + inputs[token] * inputs[token])
    return added


@triton.jit
def _factors(squares, eps, WIDTH: tl.constexpr, TOKEN_SLOTS: tl.constexpr):
    factors = ()
    for token in tl.static_range(TOKEN_SLOTS):
        factors = _append(factors, tl.rsqrt(tl.sum(squares[token], 0) / WIDTH + eps))
    return factors


@triton.jit
def _scale(inputs, gain, columns, WIDTH: tl.constexpr, TOKEN_SLOTS: tl.constexpr):
    gains = tl.load(gain + columns, mask=columns < WIDTH, other=0.0).to(tl.float32)
    scaled = ()
    for token in tl.static_range(TOKEN_SLOTS):
        scaled = _append(scaled, inputs[token] * gains)
    return scaled

"""Linear layers for a handful of tokens, with what stands before and after them in the same kernel.

With so few tokens a layer takes as long as its weight takes to arrive from memory. Each program owns some rows of the
weight and streams them past registers; the few kilobytes of activations come from cache, so every program norms
them anew. The norm's factor is applied to the finished sums, so that one pass is enough.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from aserve.kernels.gpu.launch import launch_options
from aserve.kernels.gpu.small_linear_launch import SmallLinearLaunch, choose_launch

MAX_TOKENS = 4
"""Above this, a norm kernel and a matrix product are faster."""


@dataclass(frozen=True, slots=True)
class NormBefore:
    """RMS norm of the input, of ``x + residual`` if there is a residual [T, in]."""

    weight: Tensor
    eps: float
    residual: Tensor | None = None


@dataclass(frozen=True, slots=True)
class SmallLinear:
    """A layer: weight [out, in], dense, bias [out]; ``is_gated`` returns silu(first half of out) * second half."""

    weight: Tensor
    bias: Tensor | None = None
    is_gated: bool = False

    @property
    def num_outputs(self) -> int:
        """Columns of the result."""
        return self.weight.shape[0] // 2 if self.is_gated else self.weight.shape[0]


def apply_small_linear(
    x: Tensor,
    layer: SmallLinear,
    norm: NormBefore | None,
    result: Tensor,
    overlap: bool,
    launch: SmallLinearLaunch | None = None,
) -> Tensor:
    """Write layer(norm(x)) to ``result`` [T, out], of any float dtype; return x + residual, x itself without one.

    x is [T, in], T at least 1.
    """
    num_tokens, width = x.shape
    token_slots = triton.next_power_of_2(num_tokens)
    launch = launch or choose_launch(layer.num_outputs, width, token_slots, layer.is_gated)
    residual = None if norm is None else norm.residual
    total = x if residual is None else torch.empty_like(x)  # other programs still read the old residual
    _small_linear[(triton.cdiv(layer.num_outputs, launch.block_rows),)](
        x,
        residual,
        total,
        None if norm is None else norm.weight,
        layer.weight,
        layer.bias,
        result,
        num_tokens,
        0.0 if norm is None else norm.eps,
        layer.num_outputs,
        width,
        token_slots,
        layer.is_gated,
        launch.block_rows,
        launch.block_columns,
        overlap,
        num_warps=launch.num_warps,
        **launch_options(overlap),
    )
    return total


@triton.jit(do_not_specialize=["num_tokens"])
def _small_linear(
    x,
    residual,
    total,
    gain,
    weight,
    bias,
    result,
    num_tokens: int,
    eps: float,
    NUM_OUTPUTS: tl.constexpr,
    WIDTH: tl.constexpr,
    TOKEN_SLOTS: tl.constexpr,
    IS_GATED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """While a tile of the weight is multiplied the next one is under way; the first does not wait for ``x``.

    TOKEN_SLOTS is the number of tokens rounded up to a power of two, so that few variants exist.
    """
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
            gains = tl.load(gain + start + columns, mask=start + columns < WIDTH, other=0.0).to(tl.float32)
            inputs = _scale(inputs, gains, TOKEN_SLOTS)
        sums = _add_products(sums, tile, inputs, TOKEN_SLOTS)
        tile = next_tile
        if IS_GATED:
            up_sums = _add_products(up_sums, up_tile, inputs, TOKEN_SLOTS)
            up_tile = next_up_tile

    inside = rows < NUM_OUTPUTS
    for token in tl.static_range(TOKEN_SLOTS):
        values = tl.sum(sums[token], 1)
        if IS_GATED:
            up_values = tl.sum(up_sums[token], 1)
        if gain is not None:
            factor = tl.rsqrt(tl.sum(squares[token], 0) / WIDTH + eps)
            values = values * factor
            if IS_GATED:
                up_values = up_values * factor
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
def _load_inputs(
    x,
    residual,
    total,
    columns,
    num_tokens: int,
    WIDTH: tl.constexpr,
    TOKEN_SLOTS: tl.constexpr,
):
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
def _scale(inputs, gains, TOKEN_SLOTS: tl.constexpr):
    scaled = ()
    for token in tl.static_range(TOKEN_SLOTS):
        scaled = _append(scaled, inputs[token] * gains)
    return scaled

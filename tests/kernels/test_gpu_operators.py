"""The Triton operators at small sizes: on a GPU if there is one, else in Triton's interpreter."""

import importlib.util
import logging

import pytest
import torch
from doubles_operators import (
    EPS,
    TOLERANCES,
    Dense,
    Packed,
    RopeCase,
    assert_near,
    gelu_mul64,
    linear64,
    norm64,
    poison_new_memory,
    silu_mul64,
)
from torch import Tensor

from aserve.kernels.choose import choose_operators
from aserve.kernels.gpu.gpu_operators import GpuOperators
from aserve.kernels.gpu.rope_store import can_convert_to
from aserve.kernels.gpu.small_linear import MAX_TOKENS, NormBefore, SmallLinear, apply_small_linear
from aserve.kernels.gpu.small_linear_launch import SmallLinearLaunch
from aserve.kernels.nvfp4 import NVFP4, BlockScales
from aserve.kernels.operators import HeadLayout, KVTarget, Operators

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
OPS = GpuOperators()
DTYPES = list(TOLERANCES)
NUM_TOKENS = [1, 2, 3, 5, 17]
FLOAT8 = torch.float8_e4m3fn


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    poison_new_memory(monkeypatch)


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", NUM_TOKENS)
def test_norms_and_silu(num_tokens: int, dtype: torch.dtype) -> None:
    width = 100 + 7 * num_tokens
    x, residual, weight = (draw(*shape, dtype=dtype) for shape in [(num_tokens, width)] * 2 + [(width,)])
    assert_near(OPS.rms_norm(x, weight, EPS), norm64(x, weight), dtype)
    total = x.double() + residual.double()
    normed, stream = OPS.add_rms_norm(x.clone(), residual.clone(), weight, EPS)
    assert_near(stream, total, dtype)
    assert_near(normed, norm64(total, weight), dtype)
    gate_up = draw(num_tokens, 2 * width, dtype=dtype)
    assert_near(OPS.silu_mul(gate_up), silu_mul64(gate_up), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", [1, 3, 17])
def test_gelu_and_weights_of_float32(num_tokens: int, dtype: torch.dtype) -> None:
    width = 184
    x, residual, weight = draw(num_tokens, width, dtype=dtype), draw(num_tokens, width, dtype=dtype), draw(width)
    layer = Dense(draw(6, width, dtype=dtype) / width**0.5)
    total = (x.double() + residual.double()).to(dtype)
    gate_up = draw(num_tokens, 2 * width, dtype=dtype) * 2
    assert_near(OPS.gelu_mul(gate_up), gelu_mul64(gate_up), dtype)
    assert OPS.rms_norm(x, weight, EPS).dtype == dtype
    assert_near(OPS.rms_norm(x, weight, EPS), norm64(x, weight), dtype)
    normed, stream = OPS.add_rms_norm(x.clone(), residual.clone(), weight, EPS)
    assert normed.dtype == stream.dtype == dtype
    assert_near(normed, norm64(total, weight), dtype)
    result, stream = OPS.add_norm_gate_up(x.clone(), residual.clone(), weight, EPS, layer, "gelu_tanh")
    assert result.dtype == stream.dtype == dtype
    assert_near(stream, total.double(), dtype)
    assert_near(result, gelu_mul64(linear64(norm64(total, weight), layer)), dtype)
    assert_near(OPS.norm_logits(x, weight, EPS, layer), linear64(norm64(x, weight), layer), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_head_norms_of_float32(dtype: torch.dtype) -> None:
    case = RopeCase(HeadLayout(4, 2, 64), 16, False, True, dtype, dtype, 5, DEVICE, gain_dtype=torch.float32)
    qkv, norms, cos_sin, positions, target = case.make()
    q, k, _ = case.expect(qkv, norms, cos_sin, positions)
    other = KVTarget(target.key.clone(), target.value.clone(), target.slot_mapping)
    expected = Operators().rope_store(qkv.clone(), case.heads, norms, cos_sin, positions, other)
    result = OPS.rope_store(qkv.clone(), case.heads, norms, cos_sin, positions, target)
    assert_near(result, q, dtype)
    assert_near(case.read(target.key, target.slot_mapping), k, dtype)
    assert_near(expected, q, dtype)
    assert_near(case.read(other.key, other.slot_mapping), k, dtype)


@pytest.mark.parametrize("width", [1, 16384])
def test_narrowest_and_widest_rows(width: int) -> None:
    x, weight = draw(2, width), draw(width)
    assert_near(OPS.rms_norm(x, weight, EPS), norm64(x, weight), x.dtype)
    gate_up = draw(2, 2 * width)
    assert_near(OPS.silu_mul(gate_up), silu_mul64(gate_up), x.dtype)


def test_norms_round_where_the_reference_rounds() -> None:
    """In float16, whose roundings the interpreter does as a GPU does; only the sums' order may differ."""
    x, residual, weight = draw(5, 96, dtype=torch.float16), draw(5, 96, dtype=torch.float16), draw(96).half()
    expected, expected_stream = Operators().add_rms_norm(x, residual, weight, EPS)
    normed, stream = OPS.add_rms_norm(x.clone(), residual.clone(), weight, EPS)
    assert torch.equal(stream, expected_stream)
    assert (normed != expected).float().mean() < 0.01
    wide = 1 + draw(96) / 100
    assert (OPS.rms_norm(x, wide, EPS) != Operators().rms_norm(x, wide, EPS)).float().mean() < 0.01
    gate_up = draw(5, 96, dtype=torch.float16)
    assert (OPS.silu_mul(gate_up) != Operators().silu_mul(gate_up)).float().mean() < 0.01


def test_norms_of_heads() -> None:
    heads, weight = draw(3, 4, 80), draw(80)
    assert_near(OPS.rms_norm(heads, weight, EPS), norm64(heads, weight), heads.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 5])
@pytest.mark.parametrize("has_bias", [False, True])
def test_linear_layers_with_norm_and_gate(num_tokens: int, has_bias: bool, dtype: torch.dtype) -> None:
    width = 184
    x, residual, weight = (draw(*shape, dtype=dtype) for shape in [(num_tokens, width)] * 2 + [(width,)])
    layer = Dense(draw(6, width, dtype=dtype) / width**0.5, draw(6, dtype=dtype) if has_bias else None)
    before = x.clone(), residual.clone()
    total = (x.double() + residual.double()).to(dtype)

    assert_near(OPS.linear(x, layer), linear64(x, layer), dtype)
    result, stream = OPS.add_norm_linear(x.clone(), residual.clone(), weight, EPS, layer)
    assert_near(stream, total.double(), dtype)
    assert_near(result, linear64(norm64(total, weight), layer), dtype)
    result, stream = OPS.add_norm_linear(x, None, weight, EPS, layer)
    assert stream is x
    assert_near(result, linear64(norm64(x, weight), layer), dtype)
    result, stream = OPS.add_norm_gate_up(x.clone(), residual.clone(), weight, EPS, layer)
    assert_near(stream, total.double(), dtype)
    assert_near(result, silu_mul64(linear64(norm64(total, weight), layer)), dtype)
    assert torch.equal(x, before[0])
    assert torch.equal(residual, before[1])


@pytest.mark.parametrize("num_tokens", [1, 3])
@pytest.mark.parametrize("num_outputs", [3, 10])  # less than one program's, and not a multiple of it
@pytest.mark.parametrize("width", [256, 300])  # full tiles, and a last one that is not
@pytest.mark.parametrize("launch", [SmallLinearLaunch(4, 128, 1), SmallLinearLaunch(2, 512, 1, num_steps=2)])
@pytest.mark.parametrize("is_gated", [False, True])
def test_small_linear_layers_in_several_tiles(
    is_gated: bool, launch: SmallLinearLaunch, width: int, num_outputs: int, num_tokens: int
) -> None:
    num_rows = num_outputs * (2 if is_gated else 1)
    layer = Dense(draw(num_rows, width) / width**0.5, draw(num_rows))
    x, residual, weight = draw(num_tokens, width), draw(num_tokens, width), draw(width)
    small, norm = SmallLinear(layer.dense_weight, layer.bias, is_gated), NormBefore(weight, EPS, residual)
    result = torch.empty(num_tokens, num_outputs, device=DEVICE)
    total = apply_small_linear(x, small, norm, result, overlap=False, launch=launch)
    assert torch.equal(total, x + residual)
    expected = linear64(norm64(x.double() + residual.double(), weight), layer)
    assert_near(result, silu_mul64(expected) if is_gated else expected, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", [1, 5])
def test_logits_are_float32(num_tokens: int, dtype: torch.dtype) -> None:
    x, weight = draw(num_tokens, 96, dtype=dtype), draw(96, dtype=dtype)
    layer = Dense(draw(9, 96, dtype=dtype))
    expected = linear64(norm64(x, weight), layer)
    logits = OPS.norm_logits(x, weight, EPS, layer)
    assert logits.dtype == torch.float32
    assert_near(logits, expected, dtype)
    out = torch.empty(num_tokens, 9, device=DEVICE)
    assert OPS.norm_logits(x, weight, EPS, layer, out=out) is out
    assert_near(out, expected, dtype)
    if num_tokens <= MAX_TOKENS:  # nothing was rounded to the activations' dtype on the way
        assert (logits != logits.to(torch.float16)).any()
        assert_near(logits, expected, torch.float32)


ROPE_SHAPES = [
    (HeadLayout(4, 2, 64), 16, False),
    (HeadLayout(3, 1, 80), 16, True),
    (HeadLayout(2, 2, 96), 1, False),
    (HeadLayout(7, 1, 128), 64, True),
    (HeadLayout(1, 1, 256), 64, False),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "page_size", "is_head_major"), ROPE_SHAPES)
@pytest.mark.parametrize("has_norms", [False, True])
def test_rope_store(
    heads: HeadLayout, page_size: int, is_head_major: bool, has_norms: bool, dtype: torch.dtype
) -> None:
    num_tokens = 1 + heads.num_heads
    case = RopeCase(heads, page_size, is_head_major, has_norms, dtype, dtype, num_tokens, DEVICE)
    qkv, norms, cos_sin, positions, target = case.make()
    q, k, v = case.expect(qkv, norms, cos_sin, positions)
    result = OPS.rope_store(qkv.clone(), heads, norms, cos_sin, positions, target)
    assert result.is_contiguous()
    assert_near(result, q, dtype)
    assert_near(case.read(target.key, target.slot_mapping), k, dtype)
    assert torch.equal(case.read(target.value, target.slot_mapping), v)


def test_rope_rounds_where_the_reference_rounds() -> None:
    heads = HeadLayout(4, 2, 64)
    case = RopeCase(heads, 16, False, True, torch.float16, torch.float16, 5, DEVICE)
    qkv, norms, cos_sin, positions, target = case.make()
    other = KVTarget(target.key.clone(), target.value.clone(), target.slot_mapping)
    expected = Operators().rope_store(qkv.clone(), heads, norms, cos_sin, positions, other)
    result = OPS.rope_store(qkv.clone(), heads, norms, cos_sin, positions, target)
    assert (result != expected).float().mean() < 0.01
    assert (target.key != other.key).float().mean() < 0.01


HEAD_SCALES = (torch.tensor([0.25, 0.5], device=DEVICE), torch.tensor([0.5, 0.25], device=DEVICE))


@pytest.mark.parametrize("is_head_major", [False, True])
@pytest.mark.parametrize("scales", [(0.25, 0.5), (0.5, 0.25), HEAD_SCALES], ids=str)
def test_eight_bit_pages_are_scaled_and_saturate(
    scales: tuple[float, float] | tuple[Tensor, Tensor], is_head_major: bool
) -> None:
    """With values that need no rounding: the interpreter's is wrong where it carries into the exponent."""
    heads = HeadLayout(2, 2, 64)
    case = RopeCase(heads, 16, is_head_major, False, torch.bfloat16, FLOAT8, 3, DEVICE, scales=scales)
    qkv, _, _, positions, target = case.make()
    qkv = qkv.clamp(-200, 200).to(FLOAT8).to(torch.bfloat16)
    qkv[:, ::7], qkv[:, 3::7] = 448.0, -600.0
    still = torch.cat((torch.ones(case.max_position, 32), torch.zeros(case.max_position, 32)), dim=-1).to(DEVICE)
    OPS.rope_store(qkv.clone(), heads, None, still, positions, target)
    _, k, v = case.expect(qkv, None, still, positions)
    for pages, expected, factor in zip((target.key, target.value), (k, v), scales, strict=True):
        scale = factor.view(-1, 1) if isinstance(factor, Tensor) else factor
        assert torch.equal(case.read(pages, target.slot_mapping), (expected / scale).clamp(-448, 448))


@pytest.mark.parametrize(("head_dim", "num_kv_heads", "dtype"), [(64, 2, torch.bfloat16), (96, 2, torch.float32)])
@pytest.mark.parametrize("is_head_major", [False, True])
@pytest.mark.parametrize("scales", [(0.25, 0.5), HEAD_SCALES], ids=str)
def test_four_bit_pages_hold_what_the_reference_stores(
    scales: tuple[float, float] | tuple[Tensor, Tensor],
    is_head_major: bool,
    head_dim: int,
    num_kv_heads: int,
    dtype: torch.dtype,
) -> None:
    """With scales of blocks that need no rounding, in which the interpreter errs."""
    heads = HeadLayout(3, num_kv_heads, head_dim)
    qkv = draw(5, (3 + 2 * num_kv_heads) * head_dim, dtype=dtype).clamp(-2.9, 2.9)
    qkv[:, ::16] = 6.0 * 2.0 ** torch.randint(-1, 2, qkv[:, ::16].shape, device=DEVICE).to(dtype)
    qkv[0, :64] = 0.0
    still = torch.cat((torch.ones(9, head_dim // 2), torch.zeros(9, head_dim // 2)), dim=-1).to(DEVICE)
    positions, slots = torch.arange(5, device=DEVICE), torch.tensor([13, 2, 7, 0, 30], device=DEVICE)
    targets = []
    for operators in (OPS, Operators()):
        pages = [
            torch.full((4, *((2, 8) if is_head_major else (8, 2)), width), 7, device=DEVICE).to(kind)
            for width, kind in ((head_dim // 2, torch.uint8), (head_dim // 16, FLOAT8))
            for _ in range(2)
        ]
        key, value, *blocks = (part.transpose(1, 2) if is_head_major else part for part in pages)
        target = KVTarget(key, value, slots, *scales, BlockScales(*blocks))
        operators.rope_store(qkv.clone(), heads, None, still, positions, target)
        targets.append((key, value, *(part.view(torch.uint8) for part in blocks)))
    for found, expected in zip(*targets, strict=True):
        assert torch.equal(found, expected)
    assert not torch.equal(targets[0][0], torch.full_like(targets[0][0], 7))


@pytest.mark.parametrize(
    ("capability", "can_convert"), [((8, 0), False), ((8, 6), False), ((8, 9), True), ((9, 0), True)]
)
def test_eight_bit_pages_are_left_to_the_reference_where_triton_cannot_convert(
    capability: tuple[int, int], can_convert: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its compiler lists e4m3 among the supported types from compute capability 8.9 on."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert can_convert_to(FLOAT8, torch.device("cuda")) == can_convert
    assert can_convert_to(NVFP4, torch.device("cuda")) == can_convert
    assert can_convert_to(torch.bfloat16, torch.device("cuda"))


def test_mixed_page_dtypes() -> None:
    heads = HeadLayout(2, 1, 64)
    case = RopeCase(heads, 16, False, True, torch.float32, torch.bfloat16, 3, DEVICE, scales=(0.25, 0.5))
    qkv, norms, cos_sin, positions, target = case.make()
    _, k, v = case.expect(qkv, norms, cos_sin, positions)
    OPS.rope_store(qkv.clone(), heads, norms, cos_sin, positions, target)
    assert_near(case.read(target.key, target.slot_mapping), k, torch.bfloat16)  # only 8-bit pages are scaled
    assert_near(case.read(target.value, target.slot_mapping), v, torch.bfloat16)


def test_what_kernels_do_not_serve_goes_to_the_reference() -> None:
    x, residual, weight = draw(2, 64).double(), draw(2, 64).double(), draw(64).double()
    layer, reference = Dense(draw(6, 64).double()), Operators()
    assert torch.equal(OPS.rms_norm(x, weight, EPS), reference.rms_norm(x, weight, EPS))
    assert torch.equal(
        OPS.add_norm_gate_up(x, residual, weight, EPS, layer)[0],
        reference.add_norm_gate_up(x, residual, weight, EPS, layer)[0],
    )
    columns, gain = draw(64, 2).T, draw(64)
    assert_near(OPS.rms_norm(columns, gain, EPS), norm64(columns, gain), torch.float32)
    assert_near(OPS.silu_mul(columns), silu_mul64(columns), torch.float32)
    packed = Packed(Dense(draw(6, 64)))
    rows = draw(2, 64)
    assert_near(OPS.linear(rows, packed), linear64(rows, packed.inner), torch.float32)
    assert_near(OPS.norm_logits(rows, gain, EPS, packed), linear64(norm64(rows, gain), packed.inner), torch.float32)
    wide = draw(2, 16390)
    assert_near(OPS.rms_norm(wide, draw(16390).fill_(1), EPS), norm64(wide, torch.ones_like(wide[0])), torch.float32)


def test_rope_of_odd_tables_goes_to_the_reference() -> None:
    case = RopeCase(HeadLayout(2, 1, 64), 16, False, False, torch.float32, torch.float32, 3, DEVICE)
    qkv, norms, cos_sin, positions, target = case.make()
    q, k, _ = case.expect(qkv, norms, cos_sin, positions)
    apart = torch.stack((positions, positions), dim=1)[:, 0]
    assert_near(OPS.rope_store(qkv, case.heads, norms, cos_sin, apart, target), q, torch.float32)
    assert_near(case.read(target.key, target.slot_mapping), k, torch.float32)


def test_no_tokens() -> None:
    case = RopeCase(HeadLayout(2, 1, 64), 16, False, False, torch.float32, torch.float32, 0, DEVICE)
    qkv, norms, cos_sin, positions, target = case.make()
    assert OPS.rope_store(qkv, case.heads, norms, cos_sin, positions, target).shape == (0, 2, 64)
    assert OPS.rms_norm(draw(0, 64), draw(64), EPS).shape == (0, 64)
    assert OPS.silu_mul(draw(0, 64)).shape == (0, 32)
    assert OPS.linear(draw(0, 64), Dense(draw(6, 64))).shape == (0, 6)


def test_a_cuda_device_gets_them_where_triton_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cuda = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert isinstance(choose_operators(cuda), GpuOperators)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with caplog.at_level(logging.WARNING):
        assert type(choose_operators(cuda)) is Operators
    assert "Triton is not installed" in caplog.text

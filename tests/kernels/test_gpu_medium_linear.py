"""The linear layers for some tokens at small sizes: on a GPU if there is one, else in Triton's interpreter."""

from dataclasses import replace

import pytest
import torch
from doubles_operators import (
    EPS,
    IS_INTERPRETED,
    Dense,
    Packed,
    assert_near,
    linear64,
    norm64,
    poison_new_memory,
    silu_mul64,
)
from torch import Tensor

from aserve.kernels.gpu import gpu_operators, medium_linear_launch
from aserve.kernels.gpu.gpu_operators import GpuOperators
from aserve.kernels.gpu.medium_linear import apply_medium_linear, can_multiply
from aserve.kernels.gpu.medium_linear_launch import MediumLinearLaunch, MediumLinearShape, choose_medium_launch
from aserve.kernels.gpu.small_linear import SmallLinear

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = [torch.float16] if IS_INTERPRETED else [torch.float16, torch.bfloat16]
"""Triton's interpreter multiplies the bits of bfloat16 matrices as integers."""
LAUNCHES = {
    "one block": MediumLinearLaunch(64, 32),
    "blocks of tokens": MediumLinearLaunch(64, 16, token_blocks=3),
    "two rows of programs": MediumLinearLaunch(64, 32, block_width=32, num_stages=3),
    "parts": MediumLinearLaunch(64, 16, token_blocks=2, num_parts=3),
    "wide": MediumLinearLaunch(128, 64, block_width=128, num_stages=2, num_warps=8),
}


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    poison_new_memory(monkeypatch)


def draw(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


def draw_layer(num_outputs: int, width: int, is_gated: bool, dtype: torch.dtype = torch.float16) -> Dense:
    num_rows = num_outputs * (2 if is_gated else 1)
    return Dense(draw(num_rows, width, dtype=dtype) / width**0.5, draw(num_rows, dtype=dtype))


def multiply(x: Tensor, layer: Dense, launch: MediumLinearLaunch, is_gated: bool, dtype: torch.dtype) -> Tensor:
    medium = SmallLinear(layer.dense_weight, layer.bias, is_gated)
    assert can_multiply(x, medium)
    result = torch.empty(len(x), medium.num_outputs, dtype=dtype, device=DEVICE)
    apply_medium_linear(x, medium, result, overlap=False, launch=launch)
    return result


def expect(x: Tensor, layer: Dense, is_gated: bool) -> Tensor:
    expected = linear64(x, layer)
    return silu_mul64(expected) if is_gated else expected


def assert_summed(actual: Tensor, expected: Tensor) -> None:
    """Fail if sums were rounded to the activations' dtype; matrix units cut off what is below a sum's last bit."""
    error = (actual.double() - expected).norm() / expected.norm()
    assert error < (2e-6 if IS_INTERPRETED else 1e-4), f"relative error {error:.2e}"


@pytest.mark.parametrize("num_tokens", [1, 37, 65])
@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("launch", LAUNCHES.values(), ids=LAUNCHES)
def test_tiles_reach_over_every_edge(launch: MediumLinearLaunch, is_gated: bool, num_tokens: int) -> None:
    """Sums are never rounded to the activations' dtype, which a float32 result shows."""
    layer, x = draw_layer(72, 200, is_gated), draw(num_tokens, 200)
    assert_summed(multiply(x, layer, launch, is_gated, torch.float32), expect(x, layer, is_gated))


@pytest.mark.parametrize("launch", [LAUNCHES["blocks of tokens"], LAUNCHES["parts"]], ids=["whole", "parts"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_gated", [False, True])
def test_results_in_the_activations_dtype(is_gated: bool, dtype: torch.dtype, launch: MediumLinearLaunch) -> None:
    layer, x = draw_layer(72, 136, is_gated, dtype), draw(35, 136, dtype=dtype)
    expected = expect(x, layer, is_gated)
    assert_near(multiply(x, layer, launch, is_gated, dtype), expected, dtype)
    unbiased = Dense(layer.dense_weight)
    assert_near(multiply(x, unbiased, launch, is_gated, dtype), expect(x, unbiased, is_gated), dtype)


@pytest.mark.parametrize("num_outputs", [64, 1000])
def test_parts_of_several_blocks_of_sums(num_outputs: int) -> None:
    layer, x = draw_layer(num_outputs, 64, True), draw(3, 64)
    launch = MediumLinearLaunch(64, 16, block_width=32, num_parts=2)
    assert_summed(multiply(x, layer, launch, True, torch.float32), expect(x, layer, True))


def test_more_parts_than_the_width_has_steps() -> None:
    layer, x = draw_layer(16, 64, False), draw(3, 64)
    launch = replace(LAUNCHES["parts"], num_parts=8)
    assert_summed(multiply(x, layer, launch, False, torch.float32), expect(x, layer, False))


@pytest.mark.parametrize("launch", LAUNCHES.values(), ids=LAUNCHES)
def test_a_result_does_not_depend_on_when_or_beside_what_it_is_computed(launch: MediumLinearLaunch) -> None:
    layer, x = draw_layer(72, 200, False), draw(40, 200)
    first = multiply(x, layer, launch, False, torch.float32)
    assert torch.equal(multiply(x, layer, launch, False, torch.float32), first)
    assert torch.equal(multiply(x[:21].clone(), layer, launch, False, torch.float32), first[:21])


def test_only_what_the_copy_engine_can_address() -> None:
    layer = SmallLinear(draw(16, 64))
    assert can_multiply(draw(3, 64), layer)
    assert not can_multiply(draw(3, 64, dtype=torch.float32), SmallLinear(draw(16, 64, dtype=torch.float32)))
    assert not can_multiply(draw(3, 60), SmallLinear(draw(16, 60)))
    assert not can_multiply(draw(3 * 64 + 1)[1:].view(3, 64), layer)
    assert not can_multiply(draw(3, 64), SmallLinear(draw(16 * 64 + 1)[1:].view(16, 64)))
    assert not can_multiply(draw(0, 64), layer)


def test_a_launch_stands_for_the_numbers_of_tokens_up_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    launch = LAUNCHES["one block"]
    table = {MediumLinearShape(72, 64, 32): launch, MediumLinearShape(72, 64, 320, is_gated=True): launch}
    monkeypatch.setattr(medium_linear_launch, "MEASURED", table)
    assert [choose_medium_launch(72, 64, count, False) for count in (16, 17, 32, 33)] == [None, launch, launch, None]
    assert [choose_medium_launch(72, 64, count, True) for count in (256, 257, 320, 321)] == [None, launch, launch, None]
    assert choose_medium_launch(72, 128, 32, False) is None


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Let the operators use the kernels for any layer of 5 tokens; return what they multiply, [tokens, outputs]."""
    calls: list[tuple[int, int]] = []

    def choose(num_outputs: int, width: int, num_tokens: int, is_gated: bool) -> MediumLinearLaunch | None:
        return LAUNCHES["one block"] if num_tokens == 5 else None

    def apply(x: Tensor, layer: SmallLinear, result: Tensor, overlap: bool, launch: MediumLinearLaunch) -> None:
        calls.append((len(x), layer.num_outputs))
        apply_medium_linear(x, layer, result, overlap, launch)

    monkeypatch.setattr(gpu_operators, "choose_medium_launch", choose)
    monkeypatch.setattr(gpu_operators, "apply_medium_linear", apply)
    return calls


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", [5, 6])
def test_operators_use_what_is_faster(launched: list[tuple[int, int]], num_tokens: int, dtype: torch.dtype) -> None:
    operators, layer = GpuOperators(), draw_layer(8, 96, False, dtype)
    x, residual, gain = draw(num_tokens, 96, dtype=dtype), draw(num_tokens, 96, dtype=dtype), draw(96, dtype=dtype)
    total = (x.double() + residual.double()).to(dtype)

    assert_near(operators.linear(x, layer), linear64(x, layer), dtype)
    result, stream = operators.add_norm_linear(x.clone(), residual.clone(), gain, EPS, layer)
    assert_near(stream, total.double(), dtype)
    assert_near(result, linear64(norm64(total, gain), layer), dtype)
    result, stream = operators.add_norm_gate_up(x.clone(), residual.clone(), gain, EPS, layer)
    assert_near(stream, total.double(), dtype)
    assert_near(result, silu_mul64(linear64(norm64(total, gain), layer)), dtype)
    logits = torch.empty(num_tokens, 8, device=DEVICE)
    assert operators.norm_logits(x, gain, EPS, layer, out=logits) is logits
    assert_near(logits, linear64(norm64(x, gain), layer), dtype)
    assert torch.equal(operators.norm_logits(x, gain, EPS, layer), logits)
    counts = [(5, 8), (5, 8), (5, 4), (5, 8), (5, 8)]
    assert launched == (counts if num_tokens == 5 else [])


def test_operators_leave_to_torch_what_the_kernels_do_not_serve(launched: list[tuple[int, int]]) -> None:
    operators, dtype = GpuOperators(), torch.float32
    layer, x, gain = draw_layer(8, 96, False, dtype), draw(5, 96, dtype=dtype), draw(96, dtype=dtype)
    assert_near(operators.linear(x, layer), linear64(x, layer), dtype)
    assert_near(operators.linear(x, Packed(layer)), linear64(x, layer), dtype)
    assert_near(operators.norm_logits(x, gain, EPS, layer), linear64(norm64(x, gain), layer), dtype)
    half = Dense(layer.dense_weight.half())
    result, _ = operators.add_norm_gate_up(x.half(), torch.zeros_like(x).half(), gain.half(), EPS, half)
    assert_near(result, silu_mul64(linear64(norm64(x.half(), gain.half()), half)), torch.float16)
    assert launched == [(5, 4)]

"""int8 linear layers in C against exact arithmetic in float64 on the same quantised numbers."""

import math

import pytest
import torch
from doubles_kernels import Threads, load_variant, variants
from torch import Tensor

from aserve.quantization.int8_cpu import Int8Cpu

SHAPES = [(960, 576), (576, 1536), (50, 100), (17, 33), (1, 1), (16, 32), (33, 31)]  # out, in
pytestmark = pytest.mark.parametrize("variant", variants())


def method(variant: str) -> Int8Cpu:
    return Int8Cpu(load_variant(variant))


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def quantised_product(x: Tensor, weight: Tensor) -> Tensor:
    """What the arithmetic is meant to be: both sides rounded to their int8 grids, the product in float64."""
    weight_scale = (weight.abs().amax(1, keepdim=True) / 127).double()
    rounded_weight = (weight / weight_scale.float()).round().double() * weight_scale
    groups = torch.nn.functional.pad(x, (0, -x.shape[1] % 32)).view(len(x), -1, 32)
    largest = groups.abs().amax(2, keepdim=True)
    whole = (groups * (127 / largest)).round().double()
    rounded_x = (whole * largest.double() / 127).reshape(len(x), -1)[:, : x.shape[1]]
    return rounded_x @ rounded_weight.T


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_exact_arithmetic_on_the_quantised_numbers(variant: str, shape: tuple[int, int]) -> None:
    int8, weight, x = method(variant), random(*shape), random(13, shape[1], seed=1)
    result = int8.apply(x, int8.pack(weight, torch.float32), None)
    expected = quantised_product(x, weight)
    assert result.dtype == torch.float32
    torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=1e-5 * math.sqrt(shape[1]))


@pytest.mark.parametrize("shape", [(960, 576), (3072, 576), (576, 1536)], ids=str)
def test_relative_error_of_a_layer_is_below_1_2_percent(variant: str, shape: tuple[int, int]) -> None:
    """Normal numbers; the roundings of weights (1/127 of 3.5 sigma) and of activations (of 2 sigma) give 0.9 %."""
    int8, weight, x = method(variant), random(*shape), random(32, shape[1], seed=1)
    expected = x.double() @ weight.double().T
    error = int8.apply(x, int8.pack(weight, torch.float32), None).double() - expected
    assert 0.002 < float(error.norm() / expected.norm()) < 0.012


def test_a_row_is_equal_bit_for_bit_alone_and_in_any_batch(variant: str) -> None:
    int8 = method(variant)
    weight, x = random(100, 96), random(512, 96, seed=1)
    x[3] *= 1000
    packed = int8.pack(weight, torch.float32)
    alone = torch.cat([int8.apply(x[i : i + 1], packed, None) for i in range(512)])
    for size in [*range(1, 40), 64, 127, 128, 500, 511, 512]:
        assert torch.equal(int8.apply(x[:size], packed, None), alone[:size]), size


def test_the_number_of_threads_changes_nothing(variant: str) -> None:
    int8, x = method(variant), random(70, 576, seed=1)
    packed = int8.pack(random(960, 576), torch.float32)
    results = []
    for num_threads in (1, 2, 5):
        with Threads(num_threads):
            results += [int8.apply(x, packed, None) for _ in range(10)]
    assert all(torch.equal(result, results[0]) for result in results)


def test_extremes_of_int8_do_not_saturate(variant: str) -> None:
    """All products at their largest, of either sign: sums of pairs overflow 16 bits where they are not widened."""
    int8 = method(variant)
    weight = torch.ones(32, 64) * torch.tensor([1.0, -1.0]).repeat(16).unsqueeze(1)
    x = torch.stack([torch.ones(64), -torch.ones(64)])
    result = int8.apply(x, int8.pack(weight, torch.float32), None)
    torch.testing.assert_close(result, x @ weight.T, rtol=1e-6, atol=0)


def test_bias_views_and_other_dtypes(variant: str) -> None:
    int8 = method(variant)
    weight, bias, x = random(48, 64), random(48, seed=2), random(7, 64, seed=1)
    packed = int8.pack(weight, torch.float32)
    plain = int8.apply(x, packed, None)
    torch.testing.assert_close(int8.apply(x, packed, bias), plain + bias, rtol=1e-6, atol=1e-5)
    wide = torch.full((7, 200), math.nan)
    wide[:, 10:74] = x
    assert torch.equal(int8.apply(wide[:, 10:74], packed, None), plain)
    assert torch.equal(int8.apply(x.T.contiguous().T, packed, None), plain)
    half = int8.apply(x.bfloat16(), packed, bias.bfloat16())
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.float(), plain + bias, rtol=0.02, atol=0.2)
    assert int8.apply(x[:0], packed, None).shape == (0, 48)


def test_nan_and_infinity_stay_in_their_row(variant: str) -> None:
    int8, x = method(variant), random(9, 64, seed=1)
    packed = int8.pack(random(48, 64), torch.float32)
    clean = int8.apply(x, packed, None)
    x[2, 5], x[4, 60], x[6] = math.nan, math.inf, 0.0
    result = int8.apply(x, packed, None)
    assert result[[2, 4]].isnan().all()
    assert (result[6] == 0).all()
    kept = [0, 1, 3, 5, 7, 8]
    assert torch.equal(result[kept], clean[kept])


@pytest.mark.parametrize("magnitude", [1e-38, 1e-20, 1e20, 1e34])
def test_tiny_and_huge_activations(variant: str, magnitude: float) -> None:
    int8, weight = method(variant), torch.eye(32)
    x = random(2, 32) * magnitude
    result = int8.apply(x, int8.pack(weight, torch.float32), None)
    torch.testing.assert_close(result / magnitude, x / magnitude, rtol=0, atol=0.02 if magnitude > 1e-30 else 4)
    assert result.isfinite().all()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_are_the_dequantised_weight(variant: str, shape: tuple[int, int]) -> None:
    int8, weight = method(variant), random(*shape)
    packed = int8.pack(weight, torch.bfloat16)
    row_ids = torch.tensor([shape[0] - 1, 0, shape[0] // 2, 0])
    scale = weight.abs().amax(1, keepdim=True) / 127
    expected = ((weight / scale).round() * scale)[row_ids]
    torch.testing.assert_close(int8.rows(packed, row_ids, torch.float32), expected, rtol=1e-6, atol=1e-7)
    assert int8.rows(packed, row_ids, torch.bfloat16).dtype == torch.bfloat16
    for outside in (-1, shape[0]):
        with pytest.raises(IndexError, match="row ids"):
            int8.rows(packed, torch.tensor([0, outside]), torch.float32)


def test_variants_agree_bit_for_bit(variant: str) -> None:
    """Whoever has fused multiply-adds adds up the same numbers in the same order."""
    weight, x = random(100, 96), random(9, 96, seed=1)
    result, native = (
        int8.apply(x, int8.pack(weight, torch.float32), None) for int8 in (method(variant), method("native"))
    )
    if variant == "portable":
        torch.testing.assert_close(result, native, rtol=1e-6, atol=1e-5)
    else:
        assert torch.equal(result, native)


def test_packing_is_pure_and_shares_no_memory(variant: str) -> None:
    weight = random(5000, 64)
    kept = weight.clone()
    packed, again = (method(variant).pack(weight, torch.float32) for _ in range(2))
    assert torch.equal(weight, kept)
    assert all(torch.equal(packed[key], again[key]) for key in packed)
    assert packed["weight"].shape == (313, 16, 16, 4)

"""The small operators in C against torch's in float64."""

import math

import pytest
import torch
from doubles_kernels import Threads, load_variant, variants
from doubles_operators import gelu_mul64
from torch import Tensor

from aserve.kernels.cpu_operators import CpuOperators
from aserve.kernels.operators import KVTarget, Operators

WIDTHS = [1, 5, 16, 64, 80, 576, 1000]
pytestmark = pytest.mark.parametrize("variant", variants())


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def operators(variant: str) -> CpuOperators:
    return CpuOperators(load_variant(variant))


def close(result: Tensor, expected: Tensor, tolerance: float = 2e-6) -> None:
    assert result.dtype == torch.float32
    torch.testing.assert_close(result.double(), expected.double(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("num_rows", [0, 1, 3, 300])
def test_rms_norm(variant: str, num_rows: int, width: int) -> None:
    x, weight = random(num_rows, width), random(width, seed=1)
    x64 = x.double()
    expected = x64 * torch.rsqrt(x64.square().mean(-1, keepdim=True) + 1e-5) * weight.double()
    close(operators(variant).rms_norm(x, weight, 1e-5), expected)
    assert torch.equal(x, random(num_rows, width))


def test_rms_norm_of_strided_heads(variant: str) -> None:
    wide, weight = random(7, 5, 64), random(64, seed=1)
    heads = wide[:, 1:4]
    close(operators(variant).rms_norm(heads, weight, 1e-6), Operators().rms_norm(heads.double(), weight.double(), 1e-6))


@pytest.mark.parametrize("width", WIDTHS)
def test_add_rms_norm(variant: str, width: int) -> None:
    x, residual, weight = random(33, width), random(33, width, seed=1), random(width, seed=2)
    total = x.double() + residual.double()
    expected = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + 1e-5) * weight.double()
    normed, stream = operators(variant).add_rms_norm(x, residual, weight, 1e-5)
    close(normed, expected)
    close(stream, total)


@pytest.mark.parametrize("width", WIDTHS)
def test_silu_mul(variant: str, width: int) -> None:
    gate_up = random(70, 2 * width) * 6
    gate_up[0, 0], gate_up[1, 0], gate_up[2, 0] = -200.0, 200.0, -math.inf
    gate, up = gate_up.double().chunk(2, -1)
    expected = gate / (1 + (-gate).exp()) * up
    result = operators(variant).silu_mul(gate_up)
    close(result[3:], expected[3:], 4e-6)
    close(result[:2], expected[:2], 4e-6)
    assert result[0, 0] == 0 or abs(result[0, 0]) < 1e-30


@pytest.mark.parametrize("width", WIDTHS)
def test_gelu_mul(variant: str, width: int) -> None:
    gate_up = random(70, 2 * width) * 4
    gate_up[0, 0], gate_up[1, 0] = -200.0, 200.0
    close(operators(variant).gelu_mul(gate_up), gelu_mul64(gate_up), 4e-6)


@pytest.mark.parametrize("head_dim", [2, 8, 64, 80, 128])
def test_rope_on_views_of_a_merged_projection(variant: str, head_dim: int) -> None:
    merged = random(9, 5 * head_dim)
    q, k = merged[:, : 3 * head_dim].view(9, 3, head_dim), merged[:, 3 * head_dim : 4 * head_dim].view(9, 1, head_dim)
    cos_sin = random(50, head_dim, seed=1)
    positions = torch.tensor([0, 49, 3, 3, 7, 11, 20, 21, 22])
    kept, v = merged[:, 4 * head_dim :].clone(), merged[:, 4 * head_dim :]
    expected = Operators().rope(q.double(), k.double(), cos_sin.double(), positions)
    rotated = operators(variant).rope(q, k, cos_sin, positions)
    close(rotated[0], expected[0])
    close(rotated[1], expected[1])
    assert torch.equal(v, kept)


@pytest.mark.parametrize("page_size", [1, 16])
def test_store_kv_writes_its_slots_and_no_other(variant: str, page_size: int) -> None:
    merged = random(5, 4 * 64)
    k, v = (merged[:, part * 128 : part * 128 + 128].view(5, 2, 64) for part in range(2))
    key, value = (torch.full((40 // page_size, page_size, 2, 64), math.nan) for _ in range(2))
    slots = torch.tensor([31, 0, 16, 15, 17])
    operators(variant).store_kv(k, v, KVTarget(key, value, slots))
    for pages, written in ((key, k), (value, v)):
        flat = pages.view(-1, 2, 64)
        assert torch.equal(flat[slots], written)
        untouched = torch.ones(len(flat), dtype=torch.bool)
        untouched[slots] = False
        assert flat[untouched].isnan().all()


def test_rows_do_not_depend_on_their_neighbours_or_on_threads(variant: str) -> None:
    x, residual, weight, gate_up = random(200, 576), random(200, 576, seed=1), random(576, seed=2), random(200, 3072)
    ops = operators(variant)
    for num_threads in (1, 3):
        with Threads(num_threads):
            normed, stream = ops.add_rms_norm(x.clone(), residual.clone(), weight, 1e-5)
            gated = ops.silu_mul(gate_up)
            for i in (0, 57, 199):
                row = slice(i, i + 1)
                alone, alone_stream = ops.add_rms_norm(x[row].clone(), residual[row].clone(), weight, 1e-5)
                assert torch.equal(normed[row], alone)
                assert torch.equal(stream[row], alone_stream)
                assert torch.equal(gated[row], ops.silu_mul(gate_up[row]))


def test_a_nan_stays_in_its_row(variant: str) -> None:
    ops, weight = operators(variant), torch.ones(64)
    x = random(3, 64)
    x[1, 7] = math.nan
    normed = ops.rms_norm(x, weight, 1e-5)
    assert normed.isnan().any(1).tolist() == [False, True, False]
    gated = ops.silu_mul(torch.cat((x, x), 1))
    assert gated.isnan().any(1).tolist() == [False, True, False]


def test_other_dtypes_go_to_the_reference(variant: str) -> None:
    ops = operators(variant)
    x, weight = random(4, 64).bfloat16(), random(64, seed=1).bfloat16()
    assert torch.equal(ops.rms_norm(x, weight, 1e-5), Operators().rms_norm(x, weight, 1e-5))
    assert torch.equal(ops.silu_mul(x), Operators().silu_mul(x))
    assert torch.equal(ops.gelu_mul(x), Operators().gelu_mul(x))
    key, value = (torch.zeros(2, 16, 2, 32, dtype=torch.bfloat16) for _ in range(2))
    k, slots = random(4, 2, 32), torch.tensor([1, 30, 2, 3])
    ops.store_kv(k, k, KVTarget(key, value, slots))
    assert torch.equal(key.view(-1, 2, 32)[slots], k.bfloat16())

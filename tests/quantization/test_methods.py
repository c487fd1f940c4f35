"""Every quant method that this machine can use: accuracy, independence of rows, odd shapes, embedding rows."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from aserve.errors import ConfigError
from aserve.quantization.base import QuantMethod
from aserve.quantization.registry import QUANT_METHODS, resolve_quantization

CPU = torch.device("cpu")
NAMES = [name for name, refusal in QUANT_METHODS.refusals().items() if refusal is None]
INT8_NAMES = [name for name in NAMES if name.startswith("int8")]
DTYPES = (torch.float32, torch.bfloat16)
SHAPES = [(960, 576), (576, 1536), (3072, 576), (100, 70), (33, 64), (1, 32), (17, 5), (64, 1)]  # [out, in]
ERROR = {"none": {torch.float32: 1e-5, torch.bfloat16: 0.01}, "int8": {torch.float32: 0.02, torch.bfloat16: 0.02}}


def load(name: str) -> QuantMethod:
    return resolve_quantization(name, CPU)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def relative_error(result: Tensor, exact: Tensor) -> float:
    """Root mean square of the difference over that of the exact result."""
    return float((result.double() - exact).square().mean().sqrt() / exact.square().mean().sqrt())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", NAMES)
def test_close_to_double_precision(name: str, shape: tuple[int, int], dtype: torch.dtype) -> None:
    method, weight, bias = load(name), random(*shape), random(shape[0], seed=1)
    x = random(9, shape[1], seed=2).to(dtype)
    packed = method.pack(weight, dtype)
    for used_bias in (None, bias.to(dtype)):
        result = method.apply(x, packed, used_bias)
        exact = F.linear(x.double(), weight.double(), None if used_bias is None else used_bias.double())
        assert result.dtype == dtype
        assert result.shape == exact.shape
        assert relative_error(result, exact) < ERROR[name.split("_")[0]][dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", INT8_NAMES)
def test_rows_do_not_depend_on_each_other(name: str, shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Bit for bit, for each number of rows from 1 to 64, beside rows a thousand times larger."""
    method = load(name)
    packed, bias = method.pack(random(*shape), dtype), random(shape[0], seed=1).to(dtype)
    x = random(64, shape[1], seed=2).to(dtype)
    alone = torch.cat([method.apply(row.unsqueeze(0), packed, bias) for row in x])
    for num_rows in range(1, 65):
        assert torch.equal(method.apply(x[:num_rows], packed, bias), alone[:num_rows])
        assert torch.equal(method.apply(x[-num_rows:], packed, bias), alone[-num_rows:])
    noisy = x.clone()
    noisy[::2] *= 1000
    assert torch.equal(method.apply(noisy, packed, bias)[1::2], alone[1::2])


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("name", INT8_NAMES)
def test_number_of_threads_does_not_matter(name: str, num_threads: int) -> None:
    method, x = load(name), random(70, 576, seed=2)
    packed = method.pack(random(960, 576), torch.float32)
    expected = method.apply(x, packed, None)
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        assert torch.equal(method.apply(x, packed, None), expected)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", NAMES)
def test_embedding_rows(name: str, shape: tuple[int, int], dtype: torch.dtype) -> None:
    method, weight = load(name), random(*shape)
    row_ids = torch.tensor([0, shape[0] - 1, shape[0] // 2, 0])
    rows = method.rows(method.pack(weight, dtype), row_ids, dtype)
    assert rows.dtype == dtype
    assert rows.shape == (4, shape[1])
    bound = weight.abs().amax(dim=1, keepdim=True) * (1e-6 if name == "none" else 1 / 250)
    rounding = 2**-8 * weight.abs() if dtype == torch.bfloat16 else 0
    assert ((rows.float() - weight[row_ids]).abs() <= (bound + rounding)[row_ids]).all()


@pytest.mark.parametrize("name", NAMES)
def test_rows_agree_with_apply(name: str) -> None:
    """A tied head sees the same matrix as the embedding."""
    method, weight = load(name), random(40, 64)
    packed = method.pack(weight, torch.float32)
    rows = method.rows(packed, torch.arange(40), torch.float32)
    identity = torch.eye(64)
    torch.testing.assert_close(method.apply(identity, packed, None), rows.T.contiguous(), rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_extreme_weights(name: str) -> None:
    """A row of zeros, a huge row, a tiny row, and one outlier in a row."""
    weight = random(5, 64)
    weight[0] = 0
    weight[1] *= 1e4
    weight[2] *= 1e-6
    weight[3, 7] = 300
    method, x = load(name), random(3, 64, seed=2)
    packed = method.pack(weight, torch.float32)
    result = method.apply(x, packed, None)
    assert (result[:, 0] == 0).all()
    assert result.isfinite().all()
    for row in (1, 2, 4):
        assert relative_error(result[:, row], x.double() @ weight[row].double()) < 0.03
    assert torch.equal(method.apply(torch.zeros(3, 64), packed, None), torch.zeros(3, 5))


@pytest.mark.parametrize("name", NAMES)
def test_packing_owns_its_memory(name: str) -> None:
    method, weight = load(name), random(32, 64)
    packed = method.pack(weight, torch.float32)
    before = {key: tensor.clone() for key, tensor in packed.items()}
    weight.zero_()
    assert all(torch.equal(packed[key], before[key]) for key in before)


@pytest.mark.parametrize("source", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", NAMES)
def test_any_float_type_can_be_packed(name: str, source: torch.dtype) -> None:
    method, weight = load(name), random(32, 64).to(source)
    first, second = method.pack(weight, torch.float32), method.pack(weight.float(), torch.float32)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[key], second[key]) for key in first)


@pytest.mark.parametrize("name", NAMES)
def test_inputs_with_strides(name: str) -> None:
    method, x = load(name), random(8, 130, seed=2)
    packed = method.pack(random(32, 64), torch.float32)
    sliced = x[:, 3:67]
    torch.testing.assert_close(method.apply(sliced, packed, None), method.apply(sliced.clone(), packed, None))
    assert method.apply(x[:0, :64], packed, None).shape == (0, 32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_memory_that_starts_anywhere(name: str, dtype: torch.dtype) -> None:
    """torch's int8 kernel ends the process when activations or weights are not aligned."""
    method = load(name)
    packed = method.pack(random(128, 64), dtype)
    for num_rows in (1, 5):
        x = random(num_rows, 64, seed=2).to(dtype)
        expected = method.apply(x, packed, None)
        for shift in (1, 2, 4, 8, 16):
            odd = {key: shifted(tensor, shift) for key, tensor in packed.items()}
            torch.testing.assert_close(method.apply(shifted(x, shift), odd, None), expected)


def shifted(tensor: Tensor, num_elements: int) -> Tensor:
    """A copy that starts ``num_elements`` behind an aligned address."""
    memory = torch.empty(tensor.numel() + num_elements, dtype=tensor.dtype)
    view = memory[num_elements:].view(tensor.shape)
    view.copy_(tensor)
    return view


@pytest.mark.parametrize(
    ("name", "device", "is_demo", "expected"),
    [
        ("none", "cpu", True, {"none"}),
        ("int8", "cpu", False, {"int8_cpu", "int8_torch"}),
        ("auto", "cpu", True, {"int8_cpu", "int8_torch"}),
        ("auto", "cpu", False, {"none"}),
        ("auto", "cuda", True, {"none"}),
        ("int8_torch", "cpu", False, {"int8_torch"}),
    ],
)
def test_names(name: str, device: str, is_demo: bool, expected: set[str]) -> None:
    assert resolve_quantization(name, torch.device(device), is_demo=is_demo).name in expected


def test_refusals() -> None:
    with pytest.raises(ConfigError, match="unknown quantization 'fp4'; known: none, int8_cpu, int8_torch"):
        resolve_quantization("fp4", CPU)
    with pytest.raises(ConfigError, match="runs on a CPU only, not on cuda"):
        resolve_quantization("int8", torch.device("cuda"))

"""The linear layers for some tokens on a GPU, at the sizes of real models, in graphs and overlapping."""

from collections.abc import Callable, Iterator

import pytest
import torch
from doubles_operators import EPS, Dense, assert_near, linear64, norm64, poison_new_memory, silu_mul64
from torch import Tensor

from aserve.kernels.gpu import gpu_operators
from aserve.kernels.gpu.compile_count import CompileCounter
from aserve.kernels.gpu.gpu_operators import GpuOperators
from aserve.kernels.gpu.layer_case import LayerShape, model_layers
from aserve.kernels.gpu.medium_linear import apply_medium_linear
from aserve.kernels.gpu.medium_linear_candidates import candidates
from aserve.kernels.gpu.medium_linear_launch import (
    TOKEN_BUCKETS,
    MediumLinearLaunch,
    MediumLinearShape,
    choose_medium_launch,
)
from aserve.kernels.gpu.small_linear import SmallLinear

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")
BF16 = torch.bfloat16
SUM_TOLERANCE = 1e-4  # matrix units cut off what is below a sum's last bit; rounding to bfloat16 would be 2e-3
CHAIN_TOLERANCE = 0.03  # of eight layers that round to bfloat16 in different places
LAYERS = [
    pytest.param(layer, id=f"{model} {layer.name}")
    for model, num_layers in (("Qwen3-0.6B", 5), ("Qwen3-8B", 4))  # one head is enough
    for layer in model_layers(model)[:num_layers]
]


@pytest.fixture
def _poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    poison_new_memory(monkeypatch)


@pytest.fixture
def counter() -> Iterator[CompileCounter]:
    counter = CompileCounter()
    yield counter
    counter.close()


@pytest.fixture
def _used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the operators use the kernels for every layer, measured or not."""
    monkeypatch.setattr(gpu_operators, "choose_medium_launch", guess)


def guess(num_outputs: int, width: int, num_tokens: int, is_gated: bool) -> MediumLinearLaunch | None:
    """Return the first candidate for up to the most tokens that are measured."""
    max_tokens = next((bucket for bucket in TOKEN_BUCKETS if bucket >= num_tokens), None)
    if max_tokens is None:
        return None
    return candidates(MediumLinearShape(num_outputs, width, max_tokens, is_gated))[0]


def draw(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected).norm() / expected.norm())


@pytest.mark.usefixtures("_poisoned")
@pytest.mark.parametrize("num_tokens", [5, 128, 317])
@pytest.mark.parametrize("shape", LAYERS)
def test_layers(shape: LayerShape, num_tokens: int) -> None:
    """The first guess, a later one, and what was measured to be the best; without and with overlap."""
    layer = Dense(draw(shape.num_rows, shape.width) / shape.width**0.5, draw(shape.num_rows))
    x = draw(num_tokens, shape.width)
    expected = linear64(x, layer)
    expected = silu_mul64(expected) if shape.is_gated else expected
    max_tokens = next(bucket for bucket in TOKEN_BUCKETS if bucket >= num_tokens)
    launches = candidates(MediumLinearShape(shape.num_outputs, shape.width, max_tokens, shape.is_gated))
    measured = choose_medium_launch(shape.num_outputs, shape.width, num_tokens, shape.is_gated)
    for overlap, launch in ((False, launches[0]), (True, launches[-3]), (True, measured or launches[0])):
        result = torch.empty(num_tokens, shape.num_outputs, device=DEVICE)
        apply_medium_linear(x, SmallLinear(layer.dense_weight, layer.bias, shape.is_gated), result, overlap, launch)
        assert relative_error(result, expected) < SUM_TOLERANCE, launch


@pytest.mark.usefixtures("_poisoned", "_used")
@pytest.mark.parametrize("num_tokens", [7, 200])
def test_operators(num_tokens: int) -> None:
    operators, layer = GpuOperators(overlap=True), Dense(draw(6144, 1024) / 32, draw(6144))
    x, residual, gain = draw(num_tokens, 1024), draw(num_tokens, 1024), draw(1024)
    total = x + residual
    assert_near(operators.linear(x, layer), linear64(x, layer), BF16)
    result, stream = operators.add_norm_gate_up(x.clone(), residual.clone(), gain, EPS, layer)
    assert torch.equal(stream, total)
    assert_near(result, silu_mul64(linear64(norm64(total, gain), layer)), BF16)
    logits = operators.norm_logits(x, gain, EPS, layer)
    assert (logits != logits.bfloat16()).float().mean() > 0.9
    assert_near(logits, linear64(norm64(x, gain), layer), BF16)


def feed_forward(operators: GpuOperators, num_tokens: int, hidden: int, inner: int) -> Callable[[], Tensor]:
    """Return a chain of layers, each of which reads what the one before it wrote, with and without a norm between."""
    gain = draw(hidden)
    gate_ups = [Dense(draw(2 * inner, hidden) / hidden**0.5) for _ in range(4)]
    downs = [Dense(draw(hidden, inner) / inner**0.5) for _ in range(4)]
    x, residual = draw(num_tokens, hidden), draw(num_tokens, hidden)

    def run() -> Tensor:
        update, stream = x.clone(), residual.clone()
        for gate_up, down in zip(gate_ups, downs, strict=True):
            inner_values, stream = operators.add_norm_gate_up(update, stream, gain, EPS, gate_up)
            update = operators.linear(inner_values, down)
        return torch.stack(operators.add_rms_norm(update, stream, gain, EPS))

    return run


@pytest.mark.usefixtures("_used")
@pytest.mark.parametrize(("hidden", "inner"), [(1024, 3072), (4096, 12288)])
@pytest.mark.parametrize("num_tokens", [5, 64, 128, 250])
def test_a_graph_of_overlapping_kernels_computes_the_same_bits_each_time(
    num_tokens: int, hidden: int, inner: int
) -> None:
    """As kernels do that wait for each other; and what torch computes but for rounding."""
    results = []
    for overlap in (False, True):
        torch.manual_seed(1)
        run = feed_forward(GpuOperators(overlap=overlap), num_tokens, hidden, inner)
        run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = run()
        for _ in range(20):
            output.fill_(torch.nan)
            graph.replay()
            results.append(output.clone())
    assert all(torch.equal(result, results[0]) for result in results)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu_operators, "choose_medium_launch", lambda *shape: None)
        torch.manual_seed(1)
        expected = feed_forward(GpuOperators(), num_tokens, hidden, inner)().double()
    assert relative_error(results[0], expected) < CHAIN_TOLERANCE


@pytest.mark.usefixtures("_used")
def test_a_graph_reads_what_is_in_its_input_when_it_is_replayed() -> None:
    """The copy engine's descriptors are arguments of the launch, which a graph keeps."""
    layer, x = Dense(draw(4096, 4096) / 64), draw(100, 4096)
    operators = GpuOperators(overlap=True)
    operators.linear(x, layer)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = operators.linear(x, layer)
    for _ in range(3):
        x.copy_(draw(100, 4096))
        graph.replay()
        assert_near(result, linear64(x, layer), BF16)


@pytest.mark.usefixtures("_used")
def test_nothing_compiles_for_another_number_of_tokens(counter: CompileCounter) -> None:
    operators, layer, gain = GpuOperators(overlap=True), Dense(draw(2048, 1024) / 32), draw(1024)

    def run(num_tokens: int) -> None:
        x = draw(num_tokens, 1024)
        operators.linear(x, layer)
        operators.add_norm_gate_up(x, x.clone(), gain, EPS, layer)
        operators.norm_logits(x, gain, EPS, layer)

    for num_tokens in TOKEN_BUCKETS:
        run(num_tokens)
    counter.mark()
    for num_tokens in (5, 13, 17, 31, 33, 65, 127, 191, 255, 319):
        run(num_tokens)
    assert counter.compilations() == 0

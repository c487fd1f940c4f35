"""Mixtures of experts on a GPU at the sizes of real models, against float64, in graphs and overlapping."""

from collections.abc import Iterator

import pytest
import torch
from doubles_experts import ExpertsCase, PlainExperts
from doubles_operators import assert_near, poison_new_memory
from torch import Tensor

from aserve.kernels.gpu.compile_count import CompileCounter
from aserve.kernels.gpu.gpu_operators import GpuOperators
from aserve.kernels.gpu.moe import run_moe
from aserve.kernels.operators import Operators

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")
CASES = {
    "Qwen3-30B-A3B": ExpertsCase(128, 8, 2048, 768),
    "Mixtral-8x7B": ExpertsCase(8, 2, 4096, 14336),
    "gpt-oss-20b": ExpertsCase(32, 4, 2880, 2880, has_gpt_oss_form=True),
}


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest) -> Iterator[tuple[ExpertsCase, PlainExperts]]:
    case = CASES[request.param]
    yield case, case.draw(torch.bfloat16, DEVICE)
    torch.cuda.empty_cache()


@pytest.fixture
def counter() -> Iterator[CompileCounter]:
    counter = CompileCounter()
    yield counter
    counter.close()


def expect64(x: Tensor, scores: Tensor, experts: PlainExperts) -> Tensor:
    """Return the sum in float64, expert by expert; ``moe64`` would take minutes here."""
    routing, dense, swiglu = experts.routing, experts.dense_weights, experts.swiglu
    probabilities = scores.double().softmax(dim=1)
    worst_chosen = scores.double().sort(dim=1, descending=True).values[:, routing.experts_per_token - 1, None]
    probabilities = probabilities * (scores.double() >= worst_chosen)
    if routing.is_renormalised:
        probabilities = probabilities / probabilities.sum(dim=1, keepdim=True)
    total = torch.zeros(len(x), x.shape[1], dtype=torch.float64, device=DEVICE)
    for expert in range(routing.num_experts):
        (tokens,) = probabilities[:, expert].nonzero(as_tuple=True)
        gate_up = x[tokens].double() @ dense.gate_up[expert].double().T
        if dense.gate_up_bias is not None:
            gate_up += dense.gate_up_bias[expert].double()
        gate, up = gate_up.chunk(2, dim=1)
        if swiglu.limit is not None:
            gate, up = gate.clamp(max=swiglu.limit), up.clamp(-swiglu.limit, swiglu.limit)
        hidden = gate * torch.sigmoid(swiglu.alpha * gate) * (up + swiglu.up_offset)
        part = hidden @ dense.down[expert].double().T
        if dense.down_bias is not None:
            part += dense.down_bias[expert].double()
        total[tokens] += part * probabilities[tokens, expert, None]
    return total


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 5, 64, 300, 1000, 8192])
def test_sums_equal_the_definition(
    case: tuple[ExpertsCase, PlainExperts], num_tokens: int, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape, experts = case
    x, scores = shape.draw_inputs(num_tokens, torch.bfloat16, DEVICE)
    expected = expect64(x, scores, experts)
    poison_new_memory(monkeypatch)
    assert_near(run_moe(x, scores, experts, overlap), expected, torch.bfloat16)


@pytest.mark.parametrize("num_tokens", [1, 24, 700])
def test_a_graph_serves_other_tokens_with_the_same_bits(
    case: tuple[ExpertsCase, PlainExperts], num_tokens: int
) -> None:
    """Captured with tokens that all take the same experts, replayed with others: nothing about them is in the graph."""
    shape, experts = case
    operators = GpuOperators(overlap=True)
    x, scores = shape.draw_inputs(num_tokens, torch.bfloat16, DEVICE)
    own_x, own_scores = x.clone(), scores[:1].expand_as(scores).contiguous()
    operators.moe(own_x, own_scores, experts)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = operators.moe(own_x, own_scores, experts)
    own_scores.copy_(scores)
    expected = run_moe(x, scores, experts, overlap=False)
    for _ in range(20):
        result.fill_(torch.nan)
        graph.replay()
        assert torch.equal(result, expected)


def test_the_way_without_kernels_can_be_captured(case: tuple[ExpertsCase, PlainExperts]) -> None:
    shape, experts = case
    x, scores = shape.draw_inputs(3, torch.bfloat16, DEVICE)
    Operators().moe(x, scores, experts)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = Operators().moe(x, scores, experts)
    graph.replay()
    assert_near(result, expect64(x, scores, experts), torch.bfloat16)


def test_nothing_compiles_for_another_number_of_tokens(
    case: tuple[ExpertsCase, PlainExperts], counter: CompileCounter
) -> None:
    """But for the few launches that the table holds."""
    shape, experts = case
    inputs = [shape.draw_inputs(num_tokens, torch.bfloat16, DEVICE) for num_tokens in (1, 2, 3, 16, 17, 31, 400, 8000)]
    for num_tokens in (1, 64, 150, 300, 700, 4000):
        run_moe(*shape.draw_inputs(num_tokens, torch.bfloat16, DEVICE), experts, overlap=True)
    counter.mark()
    for x, scores in inputs:
        run_moe(x, scores, experts, overlap=True)
    assert counter.compilations() == 0

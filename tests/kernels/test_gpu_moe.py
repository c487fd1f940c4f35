"""Mixtures of experts in Triton at small sizes: on a GPU if there is one, else in Triton's interpreter."""

import pytest
import torch
from doubles_experts import ExpertsCase, PlainExperts, moe64
from doubles_operators import IS_INTERPRETED, TOLERANCES, assert_near, poison_new_memory

from aserve.kernels.experts import Routing
from aserve.kernels.gpu.gpu_operators import GpuOperators
from aserve.kernels.gpu.moe import most_blocks, run_moe, sort_pairs
from aserve.kernels.gpu.moe_launch import LAUNCHES, MoeLaunch, choose_moe_launch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = [torch.float32, torch.float16] if IS_INTERPRETED else list(TOLERANCES)
"""Triton's interpreter multiplies the bits of bfloat16 matrices as integers."""
CASES = {
    "renormalised": ExpertsCase(8, 2, 64, 48),
    "not renormalised, odd sizes": ExpertsCase(5, 3, 36, 20, is_renormalised=False),
    "one of one": ExpertsCase(1, 1, 24, 16),
    "as in gpt-oss": ExpertsCase(4, 2, 64, 80, has_gpt_oss_form=True),
}
ROUTINGS = [Routing(8, 2, True), Routing(128, 8, True), Routing(200, 5, False)]


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    poison_new_memory(monkeypatch)


@pytest.mark.parametrize(("dtype", "num_tokens"), [*((dtype, 20) for dtype in DTYPES), (torch.float16, 1)])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_sums_equal_the_definition(case: ExpertsCase, num_tokens: int, dtype: torch.dtype) -> None:
    experts = case.draw(dtype, DEVICE)
    x, scores = case.draw_inputs(num_tokens, dtype, DEVICE)
    result = run_moe(x, scores, experts, overlap=False)
    assert result.dtype == dtype
    assert_near(result, moe64(x, scores, experts), dtype)


@pytest.mark.parametrize("launch", LAUNCHES.values(), ids=lambda launch: str(launch.block_rows))
def test_every_launch_in_the_table(launch: MoeLaunch) -> None:
    """With experts that no token takes, one that fills more than a block, and sizes that no tile divides."""
    case = ExpertsCase(6, 2, 72, 72, has_gpt_oss_form=True)
    experts = case.draw(torch.float16, DEVICE)
    x, scores = case.draw_inputs(launch.block_rows + 12, torch.float16, DEVICE)
    scores[:, 4] = 20.0
    scores[:, 1] = -20.0
    assert_near(run_moe(x, scores, experts, False, launch), moe64(x, scores, experts), torch.float16)


@pytest.mark.parametrize("num_tokens", [1, 70])
@pytest.mark.parametrize("routing", ROUTINGS, ids=str)
def test_pairs_are_sorted_by_expert_and_cut_into_blocks(routing: Routing, num_tokens: int) -> None:
    experts_per_token, block_rows = routing.experts_per_token, 16
    scores = torch.randn(num_tokens, routing.num_experts, device=DEVICE)
    pairs = sort_pairs(scores, routing, block_rows, overlap=False)
    chosen = scores.sort(dim=1, descending=True)
    expert_ids = chosen.indices[:, :experts_per_token].flatten()
    assert torch.equal(pairs.order.long(), expert_ids.argsort(stable=True))
    probabilities = scores.softmax(dim=1).gather(1, chosen.indices[:, :experts_per_token])
    total = probabilities.sum(dim=1, keepdim=True) if routing.is_renormalised else 1.0
    torch.testing.assert_close(pairs.weights, probabilities / total)

    assert pairs.blocks.shape == (3, most_blocks(num_tokens, routing, block_rows))
    expected, first = [], 0
    for expert, count in enumerate(expert_ids.bincount(minlength=routing.num_experts).tolist()):
        end = first + count
        expected += [(expert, row, end) for row in range(first, end, block_rows)]
        first = end
    blocks = [tuple(block) for block in pairs.blocks.T.tolist()]
    assert blocks[: len(expected)] == expected
    assert {expert for expert, _, _ in blocks[len(expected) :]} <= {routing.num_experts}


def test_the_table_has_room_for_the_worst_and_not_much_more() -> None:
    """Every token takes experts of its own as long as there are any; then one row more than fills blocks, each."""
    routing = Routing(4, 1, True)
    assert [most_blocks(num_tokens, routing, 16) for num_tokens in (1, 3, 4, 16 + 4, 64 + 4)] == [1, 3, 4, 5, 8]


def test_scores_that_are_no_numbers_still_choose_experts() -> None:
    scores = torch.full((3, 8), float("nan"), device=DEVICE)
    scores[1] = -float("inf")
    scores[2, 5] = 1.0
    pairs = sort_pairs(scores, Routing(8, 2, True), 16, overlap=False)
    assert sorted(pairs.order.tolist()) == list(range(6))
    assert pairs.order.tolist()[-1] == 4  # the best expert of the last token has the highest number
    assert pairs.blocks[0].tolist() == [0, 1, 5, 8, 8, 8]


def test_the_same_tokens_give_the_same_bits_beside_others() -> None:
    case = CASES["renormalised"]
    experts = case.draw(torch.float16, DEVICE)
    x, scores = case.draw_inputs(7, torch.float16, DEVICE)
    first = run_moe(x, scores, experts, overlap=False)
    assert torch.equal(run_moe(x, scores, experts, overlap=False), first)
    assert torch.equal(run_moe(x.flip(0), scores.flip(0), experts, overlap=False).flip(0), first)


def test_operators_take_the_kernels_for_what_they_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    monkeypatch.setattr(
        "aserve.kernels.gpu.gpu_operators.run_moe", lambda x, *_: calls.append(len(x)) or torch.zeros_like(x)
    )
    case = CASES["renormalised"]
    experts = case.draw(torch.bfloat16, DEVICE)
    x, scores = case.draw_inputs(5, torch.bfloat16, DEVICE)
    operators = GpuOperators()
    operators.moe(x, scores, experts)
    operators.moe(x, scores.float(), experts)
    assert calls == [5, 5]
    others = [
        (x[:0], scores[:0], experts),
        (x, scores.T.contiguous().T, experts),
        (x, scores, case.draw(torch.float16, DEVICE)),
    ]
    monkeypatch.setattr("aserve.kernels.operators.Operators.moe", lambda _, x, *__: calls.append(-len(x)) or x)
    for call in others:
        operators.moe(*call)
    operators.moe(x, scores, PackedExperts(experts.routing, experts.dense_weights))
    assert calls[2:] == [0, -5, -5, -5]


class PackedExperts(PlainExperts):
    """Keeps its weights in a form of its own."""

    dense_weights = property(lambda _: None, lambda *_: None)  # type: ignore[assignment]


@pytest.mark.parametrize("mean_rows", [0.1, 8, 9, 64, 65, 5000])
@pytest.mark.parametrize("shared_bytes", [99 << 10, 163 << 10, 227 << 10])
def test_launches_fit_in_shared_memory(mean_rows: float, shared_bytes: int) -> None:
    for itemsize in (2, 4):
        launch = choose_moe_launch(mean_rows, itemsize, shared_bytes)
        for product, num_parts in ((launch.gate_up, 2), (launch.down, 1)):
            columns = product.block_outputs * num_parts + launch.block_rows
            assert product.num_stages >= 2
            assert columns * product.block_width * itemsize * product.num_stages <= shared_bytes

"""Mixtures of experts in plain torch, against their definition and against transformers."""

import pytest
import torch
from doubles_experts import ExpertsCase, moe64
from doubles_operators import assert_near

from aserve.kernels.choose import choose_operators
from aserve.kernels.experts import Routing, SwiGlu, choose_experts, sum_all_experts, sum_by_expert
from aserve.kernels.operators import Operators

CPU = torch.device("cpu")
CASES = {
    "renormalised": ExpertsCase(8, 2, 32, 24),
    "not renormalised": ExpertsCase(16, 5, 32, 24, is_renormalised=False),
    "all experts": ExpertsCase(4, 4, 32, 24, is_renormalised=False),
    "one of one": ExpertsCase(1, 1, 32, 24),
    "as in gpt-oss": ExpertsCase(8, 4, 32, 24, has_gpt_oss_form=True),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_tokens", [1, 3, 70])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_what_a_cpu_gets_equals_the_definition(case: ExpertsCase, num_tokens: int, dtype: torch.dtype) -> None:
    experts = case.draw(dtype, CPU)
    x, scores = case.draw_inputs(num_tokens, dtype, CPU)
    result = choose_operators(CPU).moe(x, scores, experts)
    assert result.dtype == dtype
    assert_near(result, moe64(x, scores, experts), dtype)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_without_reading_counts_on_the_host(case: ExpertsCase) -> None:
    """The way that a GPU without kernels of its own goes."""
    experts = case.draw(torch.float32, CPU)
    x, scores = case.draw_inputs(9, torch.float32, CPU)
    choice = choose_experts(scores, experts.routing)

    def apply(rows: torch.Tensor, expert: int) -> torch.Tensor:
        return experts.down(experts.swiglu(experts.gate_up(rows, expert)), expert)

    assert_near(sum_all_experts(x, choice, case.num_experts, apply), moe64(x, scores, experts), torch.float32)


def test_an_expert_that_overflows_for_tokens_that_do_not_take_it() -> None:
    x = torch.ones(2, 4)
    choice = choose_experts(torch.tensor([[2.0, 1.0, 0.0], [0.0, 1.0, 2.0]]), Routing(3, 1, True))
    result = sum_all_experts(x, choice, 3, lambda rows, expert: rows * (torch.inf if expert == 1 else 3.0))
    torch.testing.assert_close(result, 3 * x)


def test_each_expert_is_applied_once_to_the_tokens_that_take_it() -> None:
    case = CASES["renormalised"]
    x, scores = case.draw_inputs(5, torch.float32, CPU)
    choice = choose_experts(scores, Routing(8, 2, True))
    calls = []

    def apply(rows: torch.Tensor, expert: int) -> torch.Tensor:
        calls.append((expert, len(rows)))
        return rows

    torch.testing.assert_close(sum_by_expert(x, choice, 8, apply), x)  # the weights of a token add up to one
    taken = choice.expert_ids.flatten().tolist()
    assert calls == [(expert, taken.count(expert)) for expert in range(8) if expert in taken]


def test_no_tokens() -> None:
    case = CASES["renormalised"]
    x, scores = case.draw_inputs(1, torch.float32, CPU)
    assert Operators().moe(x[:0], scores[:0], case.draw(torch.float32, CPU)).shape == (0, 32)


def test_the_gate_of_gpt_oss_equals_transformers() -> None:
    from transformers import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    theirs = GptOssExperts(GptOssConfig(hidden_size=8, intermediate_size=16, num_local_experts=2))
    gate_up = torch.randn(20, 32, generator=torch.Generator().manual_seed(2)) * 8
    gate_first = torch.cat((gate_up[:, ::2], gate_up[:, 1::2]), dim=-1)  # they alternate there
    torch.testing.assert_close(SwiGlu(1.702, 7.0, 1.0)(gate_first), theirs._apply_gate(gate_up))

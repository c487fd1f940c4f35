"""Simulated ranks on one GPU: every backend and pair that leaves log-sum-exps, against dense attention in float64."""

import pytest
import torch
from doubles_attention import make_case, make_spec
from doubles_attention_gpu import CUDA, has_lse, settings_here
from doubles_context_parallel import attend_on_all, check, problem_of

from aserve.attention.base import AttentionBackend, AttentionProblem
from aserve.attention.registry import resolve_backend

pytestmark = pytest.mark.gpu
OWN_PAGE_SIZE = 16
SPEC = make_spec(32, 8, 128)


@pytest.mark.parametrize("size", [2, 8])
@pytest.mark.parametrize("setting", [setting for setting in settings_here() if has_lse(setting)])
def test_mixed_steps_over_ranks(setting: str, size: int) -> None:
    """Decodes and chunks shorter than there are ranks, around a group's borders, and long ones."""
    group = OWN_PAGE_SIZE * size
    spans = [(1, n) for n in (1, 3, group - 1, group, group + 1, 4096)]
    spans += [(1, 2), (5, 5), (7, group + 3), (group, 2 * group), (300, 1000), (513, 513)]
    query_lens, key_lens = [query for query, _ in spans], [key for _, key in spans]
    case = make_case(SPEC, query_lens, key_lens, 6, page_size=group, dtype=torch.bfloat16, device="cuda")
    problem = problem_of(
        case, SPEC, size, capability=torch.cuda.get_device_capability(), max_num_seqs=16, max_num_tokens=2048
    )

    def make(own: AttentionProblem) -> AttentionBackend:
        return resolve_backend(setting, own, CUDA)

    check(case, SPEC, attend_on_all(case, SPEC, problem, size, make))

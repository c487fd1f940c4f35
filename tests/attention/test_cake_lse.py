"""Which rows of the cake family are asked for a log-sum-exp: never one that leaves none."""

from dataclasses import replace

import pytest
import torch
from doubles_attention import dense_attention, make_case, make_spec

from aserve.attention import cake_choice
from aserve.attention.base import AttentionProblem
from aserve.attention.cake_backend import CakeBackend
from aserve.kernels.cake.decode_variants import DECODE_VARIANTS
from aserve.kernels.cake.prefill_variants import PREFILL_VARIANTS

FP32 = torch.float32
SPEC = make_spec(2, 1, 32)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
STEPS = {"decode": ([1, 1], [9, 40], 2), "prefill": ([3, 8], [9, 40], 0)}  # query lengths, key lengths, decodes


@pytest.fixture(autouse=True)
def _silent_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before all others stand copies of the plain rows that are declared to leave no log-sum-exp."""
    for table, rows in (("DECODE_VARIANTS", DECODE_VARIANTS), ("PREFILL_VARIANTS", PREFILL_VARIANTS)):
        silent = replace(rows[-1], name=rows[-1].name.replace("plain", "silent"), writes_lse=False)
        monkeypatch.setattr(cake_choice, table, (silent, *rows))


def make_backend(*, needs_lse: bool) -> CakeBackend:
    problem = AttentionProblem("cuda", FP32, FP32, 16, (SPEC.kind,), (9, 0), max_num_seqs=4, needs_lse=needs_lse)
    return CakeBackend(problem, torch.device(DEVICE))


@pytest.mark.parametrize("phase", STEPS)
def test_a_row_without_one_serves_who_needs_none(phase: str) -> None:
    backend, case = make_backend(needs_lse=False), make_case(SPEC, *STEPS[phase], device=DEVICE)
    plan = backend.plan(case.batch)
    assert backend.kernel_name(plan, SPEC) == f"{phase}-silent"
    output, lse = backend.forward(case.q, case.layer_kv, plan, SPEC)
    assert lse is None
    torch.testing.assert_close(output.double().cpu(), dense_attention(case, SPEC)[0], rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match=f"return_lse: {phase}-silent leaves no log-sum-exp"):
        backend.forward(case.q, case.layer_kv, plan, SPEC, return_lse=True)


@pytest.mark.parametrize("phase", STEPS)
def test_it_is_passed_over_where_one_is_needed(phase: str) -> None:
    backend, case = make_backend(needs_lse=True), make_case(SPEC, *STEPS[phase], device=DEVICE)
    plan = backend.plan(case.batch)
    assert backend.kernel_name(plan, SPEC) == f"{phase}-plain"
    _, lse = backend.forward(case.q, case.layer_kv, plan, SPEC, return_lse=True)
    assert lse is not None
    torch.testing.assert_close(lse.double().cpu(), dense_attention(case, SPEC)[1], rtol=1e-5, atol=1e-5)

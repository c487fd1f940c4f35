"""Each row of the cake family's decodes at both edges of what it serves, against dense attention in float64."""

import itertools
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch
from doubles_attention import check_attention, make_case, make_spec

from aserve.attention.base import AttentionProblem
from aserve.attention.cake_backend import CakeBackend
from aserve.attention.cake_choice import choose_decodes
from aserve.attention.cake_decodes import CakeDecodes
from aserve.kernels.cake.decode_variants import DECODE_VARIANTS

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LENS = (1, 33, 32, 20, 65)  # keys of sequences, at the edges of blocks of decodes with head_dim 256
WINDOW_LENS = (1, 127, 128, 129)
CAPABILITY = (9, 0)


@dataclass(frozen=True, slots=True)
class Edge:
    """A corner of what a row serves, and the steps there."""

    row: str
    dtypes: tuple[torch.dtype, torch.dtype]
    head_dim: int
    group: int
    window: int | None
    key_lens: tuple[int, ...]

    def __str__(self) -> str:
        names = "-".join(str(dtype).removeprefix("torch.") for dtype in self.dtypes)
        return f"{self.row}-{names}-{self.head_dim}-{self.group}-{self.window}-{len(self.key_lens)}"


def edges(is_exact: bool) -> list[Edge]:
    """The least and the greatest group, number of sequences, window and head size of each row."""
    found = []
    for row in DECODE_VARIANTS[:-1]:
        if (row.max_keys is not None or row.max_seqs is not None or row.head_dims == (512,)) != is_exact:
            continue
        head_dims = sorted({row.head_dims[0], row.head_dims[-1]})
        for dtypes, group, head_dim in itertools.product(row.dtypes, (1, row.max_group), head_dims):
            for window in (1, row.max_keys) if row.max_keys else (None,):
                key_lens = WINDOW_LENS if window else LENS[: row.max_seqs]
                found.append(Edge(row.name, dtypes, head_dim, group, window, key_lens))
                if row.max_seqs:
                    found.append(replace(found[-1], key_lens=LENS[-1:]))
    return found


EXACT = edges(is_exact=True)


def check(edge: Edge) -> None:
    dtype, kv_dtype = edge.dtypes
    spec = make_spec(edge.group, 1, edge.head_dim, sliding_window=edge.window)
    problem = AttentionProblem("cuda", dtype, kv_dtype, 16, (spec.kind,), CAPABILITY, max_num_seqs=len(edge.key_lens))
    backend = CakeBackend(problem, torch.device(DEVICE))
    lens = list(edge.key_lens)
    case = make_case(spec, [1] * len(lens), lens, len(lens), dtype=dtype, kv_dtype=kv_dtype, device=DEVICE)
    plan = backend.plan(case.batch)
    assert backend.kernel_name(plan, spec) == edge.row
    output, lse = backend.forward(case.q, case.layer_kv, plan, spec, return_lse=True)
    _, lse_error = check_attention(output, lse, case, spec)
    assert lse_error < 1e-3


@pytest.mark.parametrize("edge", [edge for edge in EXACT if edge.dtypes[0] is torch.bfloat16], ids=str)
def test_exact_rows(edge: Edge) -> None:
    check(edge)


@pytest.mark.full
@pytest.mark.parametrize("edge", [edge for edge in EXACT if edge.dtypes[0] is not torch.bfloat16], ids=str)
def test_exact_rows_in_float16(edge: Edge) -> None:
    check(edge)


@pytest.mark.full
@pytest.mark.parametrize("edge", edges(is_exact=False), ids=str)
def test_generic_rows(edge: Edge) -> None:
    check(edge)


@pytest.mark.gpu
@pytest.mark.parametrize("edge", [*EXACT, *edges(is_exact=False)], ids=str)
def test_rows_on_the_gpu(edge: Edge) -> None:
    check(edge)


def test_a_model_takes_another_row_for_larger_steps() -> None:
    """The row for few sequences up to its limit, the generic one beyond; both in one backend."""
    spec = make_spec(2, 1, 256)
    problem = AttentionProblem("cuda", torch.bfloat16, torch.bfloat16, 16, (spec.kind,), CAPABILITY, max_num_seqs=8)
    choices = choose_decodes(problem, spec.kind)
    assert [step.max_seqs for step in choices] == [4, 8]
    names = [step.choice.variant.name for step in choices if step.choice.variant is not None]
    assert names == ["decode-16-d256-few", "decode-16-d256"]
    backend = CakeBackend(problem, torch.device(DEVICE))
    for key_lens, name in (([40, 7, 70, 3], names[0]), ([40, 7, 70, 3, 16], names[1])):
        case = make_case(spec, [1] * len(key_lens), key_lens, len(key_lens), dtype=torch.bfloat16, device=DEVICE)
        plan = backend.plan(case.batch)
        assert backend.kernel_name(plan, spec) == name
        output, lse = backend.forward(case.q, case.layer_kv, plan, spec)
        check_attention(output, lse, case, spec)


def test_a_problem_that_no_generic_row_serves_goes_to_the_compatibility_kernel() -> None:
    """Sinks, no window, no scales of pages, a log-sum-exp wanted and a head size that nothing is tiled for."""
    sinks = torch.tensor([0.5, -2.0, 3.0, 9.0, -0.25, 1.0], device=DEVICE)
    spec = make_spec(6, 2, 83, sinks=sinks)
    problem = AttentionProblem("cuda", torch.float16, torch.float16, 16, (spec.kind,), CAPABILITY, max_num_seqs=4)
    (step,) = choose_decodes(problem, spec.kind)
    assert step.choice.variant is DECODE_VARIANTS[-1]
    assert set(step.choice.refusals) == {row.name for row in DECODE_VARIANTS[:-1]}, "a reason for each of the others"
    backend = CakeBackend(problem, torch.device(DEVICE))
    case = make_case(spec, [1] * 4, [1, 31, 32, 130], 4, dtype=torch.float16, device=DEVICE)
    output, lse = backend.forward(case.q, case.layer_kv, backend.plan(case.batch), spec, return_lse=True)
    error, lse_error = check_attention(output, lse, case, spec)
    assert error < 2e-3
    assert lse_error < 1e-5


@pytest.mark.parametrize(
    ("num_heads", "programs_per_sm"),
    [(8, 5), (64, 3)],  # the second takes 74,240 bytes of shared memory
)
def test_a_step_is_shared_by_as_many_programs_as_run_at_once(
    num_heads: int, programs_per_sm: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = make_spec(num_heads, 1, 128).kind
    problem = AttentionProblem("cuda", torch.bfloat16, torch.float8_e4m3fn, 16, (kind,), CAPABILITY)
    decodes = CakeDecodes.for_decodes(problem, torch.device("cpu"))
    launch = choose_decodes(problem, kind)[-1].choice.variant.launch
    monkeypatch.setattr(decodes, "_device", torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132))
    assert decodes._count_programs(launch, kind) == 132 * programs_per_sm

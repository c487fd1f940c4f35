"""Paged attention in C against dense attention in float64; NaN stands wherever it has no business to read."""

import dataclasses
import math

import pytest
import torch
from doubles_attention import PagedCase, dense_attention, make_case, make_problem, make_spec
from doubles_kernels import Threads, load_variant, variants

from aserve.attention.base import AttentionSpec
from aserve.attention.cpu_backend import CpuBackend

LENGTHS = [1, 15, 16, 17, 63, 64, 65, 257, 700]
SHAPES = [(1, 64), (2, 80), (3, 64), (4, 128), (5, 20), (8, 64), (60, 16), (1, 256)]  # group, head_dim
pytestmark = pytest.mark.parametrize("variant", variants())


def make_backend(variant: str) -> CpuBackend:
    return CpuBackend(make_problem(), torch.device("cpu"), kernels=load_variant(variant))


def check(variant: str, case: PagedCase, spec: AttentionSpec, tolerance: float = 2e-5) -> None:
    backend = make_backend(variant)
    output, lse = backend.forward(case.q, case.layer_kv, backend.plan(case.batch), spec, return_lse=True)
    expected, expected_lse = dense_attention(case, spec)
    assert output.dtype == case.q.dtype
    torch.testing.assert_close(output.double(), expected, rtol=tolerance, atol=tolerance)
    assert lse is not None
    torch.testing.assert_close(lse.double(), expected_lse, rtol=2e-5, atol=2e-5)
    plain, no_lse = backend.forward(case.q, case.layer_kv, backend.plan(case.batch), spec)
    assert torch.equal(plain, output)
    assert no_lse is None


@pytest.mark.parametrize("page_size", [1, 16, 64, 256])
@pytest.mark.parametrize(("group", "head_dim"), SHAPES)
def test_decodes_of_all_lengths_at_once(variant: str, group: int, head_dim: int, page_size: int) -> None:
    spec = make_spec(2 * group, 2, head_dim)
    check(variant, make_case(spec, [1] * len(LENGTHS), LENGTHS, len(LENGTHS), page_size=page_size), spec)


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize(("group", "head_dim"), SHAPES)
def test_prompts_and_chunks_after_context(variant: str, group: int, head_dim: int, page_size: int) -> None:
    spec = make_spec(group, 1, head_dim)
    check(
        variant, make_case(spec, [1, 15, 16, 17, 50, 1, 2], [1, 15, 32, 17, 257, 31, 300], 0, page_size=page_size), spec
    )


OPTIONS: dict[str, dict[str, object]] = {
    "window 1": {"sliding_window": 1},
    "window 16": {"sliding_window": 16},
    "window 100": {"sliding_window": 100},
    "window beyond all": {"sliding_window": 10000},
    "softcap": {"softcap": 1.5},
    "sinks": {"sinks": torch.tensor([-2.0, 0.0, 1.0, 3.0, -torch.inf, 0.5])},
    "all": {"sliding_window": 16, "softcap": 3.0, "sinks": torch.linspace(-1, 2, 6)},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_window_softcap_and_sinks(variant: str, options: dict[str, object]) -> None:
    spec = make_spec(6, 2, 64, **options)
    check(variant, make_case(spec, [1, 1, 1, 60, 17], [1, 33, 700, 60, 300], 3), spec)


@pytest.mark.parametrize("window", [1, 50, 128])
def test_keys_before_the_window_are_never_read(variant: str, window: int) -> None:
    """Their pages may be gone: NaN stands there, and the table names a page of NaN."""
    spec = make_spec(6, 2, 64, sliding_window=window)
    case = make_case(spec, [1, 5, 40], [700, 500, 400], 1)
    expected, _ = dense_attention(case, spec)
    for seq, (query_len, key_len) in enumerate(zip(case.batch.query_lens, case.batch.key_lens, strict=True)):
        for position in range(max(0, key_len - query_len + 1 - window)):
            page = int(case.batch.page_table[seq, position // 16])
            case.layer_kv.key[page, position % 16] = math.nan
            case.layer_kv.value[page, position % 16] = math.nan
    backend = make_backend(variant)
    output, _ = backend.forward(case.q, case.layer_kv, backend.plan(case.batch), spec)
    torch.testing.assert_close(output.double(), expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 8e-3), (torch.float16, 1e-3)])
@pytest.mark.parametrize("head_dim", [20, 64])
def test_half_precision_pools(variant: str, head_dim: int, dtype: torch.dtype, tolerance: float) -> None:
    """Inputs are exact in float64, so only the rounding of the output is left (2^-8 and 2^-11 of its size)."""
    spec = make_spec(3, 1, head_dim)
    check(variant, make_case(spec, [1, 1, 20], [100, 257, 60], 2, dtype=dtype), spec, tolerance)


@pytest.mark.parametrize("options", [OPTIONS["window 100"], {}], ids=["window", "plain"])
def test_rows_are_equal_bit_for_bit_alone_and_in_a_batch(variant: str, options: dict[str, object]) -> None:
    spec = make_spec(9, 3, 64, **options)
    case = make_case(spec, [1, 1, 1, 40, 5, 100], [192, 3, 2000, 300, 900, 100], 3)
    backend = make_backend(variant)
    together = []
    for num_threads in (1, 2, 5):
        with Threads(num_threads):
            together.append(backend.forward(case.q, case.layer_kv, backend.plan(case.batch), spec, return_lse=True))
    assert all(torch.equal(output, together[0][0]) for output, _ in together)
    for seq in range(6):
        tokens = slice(int(case.batch.cu_query_lens[seq]), int(case.batch.cu_query_lens[seq + 1]))
        alone = dataclasses.replace(
            case.batch,
            query_lens=[case.batch.query_lens[seq]],
            key_lens=[case.batch.key_lens[seq]],
            num_decodes=int(seq < 3),
            cu_query_lens=torch.tensor([0, case.batch.query_lens[seq]], dtype=torch.int32),
            key_lens_device=case.batch.key_lens_device[seq : seq + 1],
            page_table=case.batch.page_table[seq : seq + 1, : -(-case.batch.key_lens[seq] // 16)],
        )
        output, lse = backend.forward(case.q[tokens], case.layer_kv, backend.plan(alone), spec, return_lse=True)
        assert torch.equal(output, together[0][0][tokens])
        assert lse is not None
        assert together[0][1] is not None
        assert torch.equal(lse, together[0][1][tokens])


CUTS = [[1] * 12, [5, 1, 3, 3], [11, 1], [4, 8]]  # of a chunk's queries


@pytest.mark.parametrize("options", [{}, *OPTIONS.values()], ids=["plain", *OPTIONS.keys()])
@pytest.mark.parametrize("key_len", [12, 70, 513, 1300])
def test_rows_are_equal_bit_for_bit_however_a_prompt_is_cut(
    variant: str, key_len: int, options: dict[str, object]
) -> None:
    """A single row, rows of one item, of several, and with keys that are shared between items or are not."""
    spec = make_spec(6, 2, 64, **options)
    case = make_case(spec, [key_len], [key_len], 0)
    backend = make_backend(variant)
    whole, whole_lse = backend.forward(case.q, case.layer_kv, backend.plan(case.batch), spec, return_lse=True)
    assert whole_lse is not None
    for cut in CUTS:
        end = key_len
        for query_len in reversed(cut):
            output, lse = attend_to_chunk(backend, case, spec, end - query_len, end)
            assert torch.equal(output, whole[end - query_len : end])
            assert torch.equal(lse, whole_lse[end - query_len : end])
            end -= query_len


def attend_to_chunk(
    backend: CpuBackend, case: PagedCase, spec: AttentionSpec, start: int, end: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return output and LSE for queries ``start .. end - 1`` of the case's one sequence, as a chunk of their own."""
    batch = dataclasses.replace(
        case.batch,
        query_lens=[end - start],
        key_lens=[end],
        cu_query_lens=torch.tensor([0, end - start], dtype=torch.int32),
        key_lens_device=torch.tensor([end], dtype=torch.int32),
    )
    output, lse = backend.forward(case.q[start:end], case.layer_kv, backend.plan(batch), spec, return_lse=True)
    assert lse is not None
    return output, lse


def test_a_nan_query_hurts_no_other_row(variant: str) -> None:
    spec = make_spec(6, 2, 64)
    case = make_case(spec, [1, 1, 20], [40, 50, 60], 2)
    backend = make_backend(variant)
    clean, _ = backend.forward(case.q, case.layer_kv, backend.plan(case.batch), spec)
    case.q[0, 2, 3] = case.q[7, 1, 0] = math.nan
    output, _ = backend.forward(case.q, case.layer_kv, backend.plan(case.batch), spec)
    is_hurt = torch.zeros(22, 6, dtype=torch.bool)
    is_hurt[0, 2] = is_hurt[7, 1] = True
    assert output[is_hurt].isnan().all()
    assert torch.equal(output[~is_hurt], clean[~is_hurt])


def test_queries_may_be_a_strided_view(variant: str) -> None:
    spec = make_spec(4, 2, 64)
    case = make_case(spec, [1, 5], [9, 12], 1)
    wide = torch.full((6, 8, 64), math.nan)
    wide[:, :4] = case.q
    check(variant, dataclasses.replace(case, q=wide[:, :4]), spec)


def test_large_scores_do_not_overflow(variant: str) -> None:
    spec = make_spec(6, 2, 64)
    case = make_case(spec, [1, 30], [300, 300], 1)
    case.q.mul_(60)
    check(variant, case, spec, 2e-4)


def test_rows_of_query_length_zero_are_passed_over(variant: str) -> None:
    """Padding: sequences without a token of this step, at either end and in the middle."""
    spec = make_spec(3, 1, 64)
    case = make_case(spec, [0, 1, 0, 0, 20, 0], [5, 300, 7, 1, 40, 1], 0)
    check(variant, case, spec)


def test_what_it_cannot_serve_is_refused_by_name(variant: str) -> None:
    del variant  # decided before anything is compiled
    assert CpuBackend.refuse(make_problem(), "decode") is None
    assert "CPU only" in str(CpuBackend.refuse(make_problem("cuda"), "decode"))
    assert "head_dim 512" in str(CpuBackend.refuse(make_problem(head_dim=512), "decode"))
    assert "float64" in str(CpuBackend.refuse(make_problem(dtype=torch.float64), "decode"))

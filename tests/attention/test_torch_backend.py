"""The torch backend against dense attention in float64; NaN stands wherever it has no business to read."""

import dataclasses
import itertools

import pytest
import torch
from doubles_attention import CapturedCase, PagedCase, dense_attention, make_case, make_spec, torch_backend

from aserve.attention.base import AttentionSpec, CaptureShape
from aserve.attention.torch_backend import TorchBackend
from aserve.kernels.nvfp4 import NVFP4

LENGTHS = [1, 15, 16, 17, 257]


def check(case: PagedCase, spec: AttentionSpec, tolerance: float = 2e-5) -> None:
    backend = torch_backend()
    output, lse = backend.forward(case.q, case.layer_kv, backend.plan(case.batch), spec, return_lse=True)
    plain, no_lse = backend.forward(case.q, case.layer_kv, backend.plan(case.batch), spec)
    expected, expected_lse = dense_attention(case, spec)
    assert output.dtype == case.q.dtype
    assert lse is not None
    assert lse.dtype == torch.float32
    assert no_lse is None
    torch.testing.assert_close(output.double().cpu(), expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(plain.double().cpu(), expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(lse.double().cpu(), expected_lse, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("page_size", [1, 16, 64, 256])
@pytest.mark.parametrize(("group", "head_dim"), [(1, 64), (2, 80), (3, 64), (4, 128), (8, 64)])
def test_decodes_of_all_lengths_at_once(group: int, head_dim: int, page_size: int) -> None:
    spec = make_spec(2 * group, 2, head_dim)
    check(make_case(spec, [1] * 5, LENGTHS, 5, page_size=page_size), spec)


@pytest.mark.parametrize("page_size", [1, 16, 64, 256])
@pytest.mark.parametrize(("group", "head_dim"), [(1, 80), (2, 64), (3, 64), (4, 64), (8, 128)])
def test_prompts_and_chunks_after_context(group: int, head_dim: int, page_size: int) -> None:
    spec = make_spec(group, 1, head_dim)
    check(make_case(spec, [1, 15, 16, 17, 40, 1], [1, 15, 32, 17, 257, 31], 0, page_size=page_size), spec)


@pytest.mark.parametrize("num_decodes", [1, 3])
def test_decodes_stand_before_chunks(num_decodes: int) -> None:
    spec = make_spec(9, 3, 64)
    check(make_case(spec, [1] * num_decodes + [7, 1, 20], [*[17, 5, 40][:num_decodes], 7, 16, 33], num_decodes), spec)


OPTIONS: dict[str, dict[str, object]] = {
    "window 1": {"sliding_window": 1},
    "window 16": {"sliding_window": 16},
    "window beyond all": {"sliding_window": 1000},
    "softcap": {"softcap": 1.5},
    "sinks": {"sinks": torch.tensor([-2.0, 0.0, 1.0, 3.0, -torch.inf, 0.5])},
    "all": {"sliding_window": 16, "softcap": 3.0, "sinks": torch.linspace(-1, 2, 6)},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_window_softcap_and_sinks(options: dict[str, object]) -> None:
    spec = make_spec(6, 2, 64, **options)
    check(make_case(spec, [1, 1, 1, 30, 17], [1, 33, 100, 30, 50], 3), spec)


def test_long_chunks_are_computed_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tiny block limit cuts one chunk into many, at places that are no page borders."""
    monkeypatch.setattr("aserve.attention.torch_backend.MAX_BLOCK_SCORES", 1)
    for options in ({}, OPTIONS["window 16"]):
        spec = make_spec(2, 1, 64, **options)
        check(make_case(spec, [75], [101], 0), spec)


def test_decodes_of_very_different_length_are_grouped_and_put_back() -> None:
    spec = make_spec(3, 1, 64)
    case = make_case(spec, [1] * 7, [500, 2, 300, 4, 499, 1, 310], 7)
    assert len(torch_backend().plan(case.batch).groups) == 3
    check(case, spec)


def test_a_group_gathers_a_bounded_number_of_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aserve.attention.torch_backend.MAX_GROUP_KEYS", 50)
    spec = make_spec(1, 1, 64)
    case = make_case(spec, [1] * 5, [20, 22, 21, 60, 23], 5)
    assert [group.max_key_len for group in torch_backend().plan(case.batch).groups] == [21, 23, 60]
    check(case, spec)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 8e-3), (torch.float16, 1e-3)])
def test_half_precision_pools_accumulate_in_float32(dtype: torch.dtype, tolerance: float) -> None:
    """Inputs are exact in float64, so only the rounding of the output is left (2^-8 and 2^-11 of its size)."""
    spec = make_spec(3, 1, 64)
    case = make_case(spec, [1, 1, 20], [100, 257, 60], 2, dtype=dtype)
    backend = torch_backend()
    output, lse = backend.forward(case.q, case.layer_kv, backend.plan(case.batch), spec, return_lse=True)
    expected, expected_lse = dense_attention(case, spec)
    torch.testing.assert_close(output.double(), expected, rtol=tolerance, atol=tolerance / 4)
    assert lse is not None
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=1e-5)


def test_queries_may_be_a_strided_view() -> None:
    spec = make_spec(4, 2, 64)
    case = make_case(spec, [1, 5], [9, 12], 1)
    wide = torch.zeros(6, 8, 64)
    wide[:, :4] = case.q
    check(dataclasses.replace(case, q=wide[:, :4]), spec)


HEAD_SCALES = (torch.tensor([0.25, 2.0]), torch.tensor([4.0, 0.5]))


@pytest.mark.parametrize("kv_dtype", [torch.float8_e4m3fn, NVFP4], ids=["fp8", "nvfp4"])
@pytest.mark.parametrize("scales", [(0.25, 0.5), HEAD_SCALES], ids=["layer", "head"])
@pytest.mark.parametrize("query_lens", [[1, 1, 1], [1, 7, 20]])
def test_scales_of_keys_and_values_are_applied_once(
    query_lens: list[int], scales: tuple[float, float] | tuple[torch.Tensor, torch.Tensor], kv_dtype: torch.dtype
) -> None:
    spec = make_spec(4, 2, 64)
    key_lens, num_decodes = [40, 17, 33], query_lens.count(1)
    case = make_case(spec, query_lens, key_lens, num_decodes, kv_dtype=kv_dtype, scales=scales)
    check(case, spec)


def test_one_key_has_its_score_as_lse() -> None:
    spec = make_spec(1, 1, 64)
    case = make_case(spec, [1], [1], 1)
    backend = torch_backend()
    assert backend.lse_base == "e"
    _, lse = backend.forward(case.q, case.layer_kv, backend.plan(case.batch), spec, return_lse=True)
    assert lse is not None
    assert lse.item() == pytest.approx(float(case.q[0, 0] @ case.keys[0][0, 0]) * spec.scale, rel=1e-5)


def test_replay_uses_the_captured_buffers_and_overwrites_all_of_them() -> None:
    """The plan stands in for a graph: a larger replay left it dirty, and batches smaller than it are padded."""
    spec = make_spec(6, 2, 64, sliding_window=100)
    backend = torch_backend()
    captured = CapturedCase.make(CaptureShape(4, 4, 0), 8, 16)
    plan = backend.prepare_capture(captured.shape, captured.tables)
    tensors = [tensor for group in plan.groups for tensor in (group.page_table, group.key_lens)]
    addresses = [tensor.data_ptr() for tensor in tensors]
    for seed, key_lens in enumerate(([128, 120, 1, 77], [1, 1, 1, 1], [17, 3, 128, 64], [5, 16], [40])):
        num_decodes = len(key_lens)
        case = make_case(spec, [1] * num_decodes, list(key_lens), num_decodes, seed=seed)
        backend.prepare_replay(plan, captured.fill(case, dummy_page=int(case.batch.page_table[0, 0])))
        backend.convert(plan)
        q = torch.cat((case.q, torch.zeros(4 - num_decodes, 6, 64)))
        output, lse = backend.forward(q, case.layer_kv, plan, spec, return_lse=True)
        expected, expected_lse = dense_attention(case, spec)
        torch.testing.assert_close(output[:num_decodes].double(), expected, rtol=2e-5, atol=2e-5)
        assert output.isfinite().all()
        assert lse is not None
        torch.testing.assert_close(lse[:num_decodes].double(), expected_lse, rtol=2e-5, atol=2e-5)
    assert addresses == [tensor.data_ptr() for group in plan.groups for tensor in (group.page_table, group.key_lens)]


def test_a_captured_plan_keeps_nothing_of_the_tables_at_capture() -> None:
    spec = make_spec(1, 1, 64)
    backend = torch_backend()
    captured = CapturedCase.make(CaptureShape(2, 2, 0), 2, 16)
    captured.fill(make_case(spec, [1, 1], [30, 32], 2, seed=1), 0)
    plan = backend.prepare_capture(captured.shape, captured.tables)
    backend.convert(plan)
    case = make_case(spec, [1, 1], [32, 20], 2)
    captured.fill(case, 0)
    backend.convert(plan)
    output, _ = backend.forward(case.q, case.layer_kv, plan, spec)
    torch.testing.assert_close(output.double(), dense_attention(case, spec)[0], rtol=2e-5, atol=2e-5)


def test_only_decodes_are_captured() -> None:
    backend = torch_backend()
    assert backend.captures_decodes
    assert not backend.captures_chunks
    half = TorchBackend(backend.problem, backend.device, ("decode",))
    assert not half.captures_decodes, "a pair with this backend runs without graphs"
    long = dataclasses.replace(backend.problem, max_num_seqs=320, max_model_len=40_960)
    assert not TorchBackend(long, backend.device).captures_decodes, "13 million keys, 50 GiB in float32, are too many"
    captured = CapturedCase.make(CaptureShape(4, 1, 1), 1, 16)
    with pytest.raises(ValueError, match="only batches of decodes"):
        backend.prepare_capture(captured.shape, captured.tables)


def test_output_goes_where_it_is_wanted_and_other_rows_stay() -> None:
    spec = make_spec(2, 1, 64)
    case = make_case(spec, [1, 5], [9, 12], 1)
    backend = torch_backend()
    out = torch.full((8, 2, 64), 7.0)
    output, _ = backend.forward(case.q, case.layer_kv, backend.plan(case.batch), spec, out=out[:6])
    assert output.data_ptr() == out.data_ptr()
    torch.testing.assert_close(out[:6].double(), dense_attention(case, spec)[0], rtol=2e-5, atol=2e-5)
    assert bool((out[6:] == 7.0).all())


@pytest.mark.full
@pytest.mark.parametrize("page_size", [1, 16, 64, 256])
@pytest.mark.parametrize(("group", "head_dim"), list(itertools.product([1, 2, 3, 4, 8], [64, 80, 128])))
def test_grid(group: int, head_dim: int, page_size: int) -> None:
    spec = make_spec(2 * group, 2, head_dim)
    for num_decodes in (0, 2, 5):
        query_lens = [1] * num_decodes + LENGTHS[num_decodes:]
        check(make_case(spec, query_lens, LENGTHS, num_decodes, page_size=page_size), spec)
    check(make_case(spec, LENGTHS, [length + 33 for length in LENGTHS], 0, page_size=page_size), spec)

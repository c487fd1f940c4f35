"""Every backend and pair that this GPU allows, against dense attention in float64; NaN in all that is not theirs."""

import functools
import time
from typing import Any

import pytest
import torch
from doubles_attention import MAX_ERRORS, CapturedCase, PagedCase, dense_attention, make_case, make_spec
from doubles_attention_gpu import CapturedRun, build, check, has_lse, run_eagerly, settings_here

from aserve.attention.base import AttentionSpec, CaptureShape, StepLens
from aserve.attention.cake_backend import CakeBackend
from aserve.attention.flash_infer_backend import FlashInferBackend
from aserve.attention.hybrid import HybridBackend
from aserve.kernels.nvfp4 import NVFP4

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16
FP8: dict[str, Any] = {"kv_dtype": torch.float8_e4m3fn, "scales": (0.25, 0.5)}
FP4: dict[str, Any] = {"kv_dtype": NVFP4, "scales": (0.25, 0.5)}
LENS = [1, 15, 16, 17, 4096]
CHUNKS = ([1, 15, 16, 17, 300, 200, 1], [1, 15, 33, 4096, 300, 257, 70])  # of queries, of keys
GROUPS = (1, 2, 3, 4, 7, 8)
HERE = settings_here()
WITHOUT_XQA = [setting for setting in HERE if "trtllm" not in setting]  # whose kernels are built for few shapes
FI_ONLY = [setting for setting in HERE if not {"fa", "trtllm"} & set(setting.split(","))]


@functools.cache
def step(group: int, head_dim: int, page_size: int) -> tuple[AttentionSpec, PagedCase]:
    """Decodes of LENS, then CHUNKS."""
    spec = make_spec(group * 2, 2, head_dim)
    query_lens, key_lens = [1] * len(LENS) + CHUNKS[0], LENS + CHUNKS[1]
    return spec, make_case(spec, query_lens, key_lens, len(LENS), page_size=page_size, dtype=BF16, device="cuda")


@pytest.fixture(autouse=True)
def _few_references_at_once() -> None:
    torch.cuda.empty_cache()


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("setting", WITHOUT_XQA)
def test_mixed_steps_of_all_groups(setting: str, head_dim: int, page_size: int) -> None:
    for group in GROUPS:
        spec, case = step(group, head_dim, page_size)
        run_eagerly(setting, case, spec)


@pytest.mark.parametrize("setting", WITHOUT_XQA)
def test_head_dim_256(setting: str) -> None:
    spec, case = step(8, 256, 16)
    run_eagerly(setting, case, spec)


@pytest.mark.parametrize(("group", "page_size"), [(4, 16), (4, 64), (8, 16)])
@pytest.mark.parametrize("setting", [setting for setting in HERE if "trtllm" in setting])
def test_the_shapes_that_xqa_is_built_for(setting: str, group: int, page_size: int) -> None:
    spec, case = step(group, 128, page_size)
    run_eagerly(setting, case, spec)


@pytest.mark.parametrize("setting", HERE)
def test_40_000_keys(setting: str) -> None:
    spec = make_spec(32, 8, 128)
    case = make_case(spec, [1, 1, 5], [40_000, 3, 39_000], 2, dtype=BF16, device="cuda")
    run_eagerly(setting, case, spec)


@pytest.mark.parametrize("setting", WITHOUT_XQA)
def test_windows_and_capped_scores(setting: str) -> None:
    options: list[tuple[int, dict[str, Any]]] = [(128, {"sliding_window": 100}), (256, {"softcap": 5.0})]
    for head_dim, option in options:
        for group in (2, 4):
            spec = make_spec(group * 2, 2, head_dim, **option)
            case = make_case(spec, [1, 1, 1, 30, 250], [1, 99, 700, 30, 500], 3, dtype=BF16, device="cuda")
            run_eagerly(setting, case, spec)


@pytest.mark.parametrize("setting", HERE)
def test_a_prefix_hit_gives_what_cold_prefill_gives(setting: str) -> None:
    spec = make_spec(32, 8, 128)
    cold = make_case(spec, [3136], [3136], 0, dtype=BF16, device="cuda")
    hit = make_case(spec, [64], [3136], 0, dtype=BF16, device="cuda")
    outputs = []
    for case, q in ((cold, cold.q), (hit, cold.q[-64:])):
        backend = build(setting, case, spec)
        outputs.append(backend.forward(q, cold.layer_kv, backend.plan(case.batch), spec)[0][-64:].float().flatten(1))
    errors = (outputs[1] - outputs[0]).norm(dim=1) / outputs[0].norm(dim=1)
    assert errors.max().item() <= MAX_ERRORS[BF16]


@pytest.mark.parametrize("setting", FI_ONLY)
def test_8_bit_pages(setting: str) -> None:
    """Scales that are not 1; the cache alone costs a twentieth at most."""
    for num_heads in (16, 32):
        spec = make_spec(num_heads, 8, 128)
        sizes: tuple[Any, ...] = ([1, 1, 30, 200], [700, 17, 30, 900], 2)
        case = make_case(spec, *sizes, dtype=BF16, device="cuda", **FP8)
        run_eagerly(setting, case, spec)
        exact = make_case(spec, *sizes, dtype=BF16, device="cuda")
        backend = build(setting, case, spec)
        output, _ = backend.forward(exact.q, case.layer_kv, backend.plan(case.batch), spec)
        expected, _ = dense_attention(exact, spec)
        error = (output.double().cpu() - expected).norm() / expected.norm()
        assert error < 0.05


@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_pages_of_nvfp4(head_dim: int) -> None:
    """With scales that are not 1, of a layer and of each head."""
    per_head = (torch.tensor([0.25, 2.0], device="cuda"), torch.tensor([4.0, 0.5], device="cuda"))
    for scales, options in (((0.25, 0.5), {}), (per_head, {"sliding_window": 100, "softcap": 5.0})):
        spec = make_spec(8, 2, head_dim, **options)
        sizes: tuple[Any, ...] = ([1, 1, 1, 30, 200], [700, 17, 4096, 30, 900], 3)
        case = make_case(spec, *sizes, dtype=BF16, device="cuda", kv_dtype=NVFP4, scales=scales)
        run_eagerly("cake", case, spec)


@pytest.mark.parametrize("setting", HERE)
def test_pages_at_the_end_of_a_large_pool(setting: str) -> None:
    """Element offsets beyond 32 bits in keys and in values."""
    spec = make_spec(32, 8, 128)
    num_pages = 2**31 // (16 * 8 * 128) + 5000
    case = make_case(spec, [1, 1, 20], [300, 17, 50], 2, dtype=BF16, kv_dtype=BF16, num_pages=num_pages, device="cuda")
    assert int(case.batch.page_table.min()) * 16 * 8 * 128 > 2**31
    run_eagerly(setting, case, spec)


@pytest.mark.parametrize("setting", [setting for setting in HERE if not setting.startswith(("torch,", "fa,"))])
@pytest.mark.parametrize("num_heads", [16, 32])
def test_captured_decodes_of_every_batch_size(setting: str, num_heads: int) -> None:
    """In the smallest graph that holds them, after larger batches have left their traces."""
    spec = make_spec(num_heads, 8, 128)
    if "trtllm" in setting and num_heads == 16:
        spec = make_spec(64, 8, 128)
    generator = torch.Generator().manual_seed(3)
    cases = []
    for size in range(1, 65):
        key_lens = torch.randint(1, 400, (size,), generator=generator).tolist()
        cases.append(make_case(spec, [1] * size, key_lens, size, dtype=BF16, device="cuda", seed=size))
    backend = build(setting, cases[0], spec)
    if not backend.captures_decodes:
        assert setting.endswith("torch")
        return
    sizes = [1, 2, 4, *range(8, 65, 8)]
    runs = {
        size: CapturedRun(backend, CaptureShape(size, size, 0), cases, spec, return_lse=has_lse(setting))
        for size in reversed(sizes)
    }
    for case in reversed(cases):
        size = next(size for size in sizes if size >= len(case.batch.key_lens))
        runs[size].replay(case)
    for case in cases[::7]:
        runs[64].replay(case)


@pytest.mark.parametrize("num_heads", [8, 16, 32])
@pytest.mark.parametrize("size", [72, 160])
def test_plans_that_are_kept_serve_longer_keys(size: int, num_heads: int) -> None:
    """As many decodes as before, each some keys further on: across pages, and a page into the next."""
    spec = make_spec(num_heads, 8, 128)
    count = size - 5
    steps = [[length + (i % 7) * 40 for i in range(count)] for length in (1, 2, 15, 16, 17, 33, 300)]
    cases = [make_case(spec, [1] * count, lens, count, dtype=BF16, device="cuda") for lens in steps]
    backend = build("fi", cases[0], spec, max_num_seqs=size)
    run = CapturedRun(backend, CaptureShape(size, size, 0), cases, spec, return_lse=True)
    for case in cases:
        run.replay(case)


def mixed_steps(spec: AttentionSpec, **options: Any) -> list[PagedCase]:
    sizes = [
        ([1, 1, 1, 30, 17, 300], [1, 33, 257, 30, 50, 700], 3),
        ([1, 1, 7], [9, 40, 7], 2),
        ([400], [900], 0),
        ([1] * 9 + [2, 1], [33] * 9 + [2, 65], 9),
        ([1] * 40, [100] * 40, 40),
        ([16] * 32, [50] * 32, 0),
        ([1] * 64 + [448], [200] * 64 + [5000], 64),
        ([1, 511], [3000, 511], 1),
    ]
    cases = [make_case(spec, *size, dtype=BF16, device="cuda", seed=seed, **options) for seed, size in enumerate(sizes)]
    return [*cases, *reversed(cases)]


@pytest.mark.parametrize("setting", HERE)
@pytest.mark.parametrize("num_heads", [16, 32])
def test_captured_mixed_steps(setting: str, num_heads: int) -> None:
    """Replayed over what larger and smaller steps have left, with NaN in the output before."""
    spec = make_spec(64 if "trtllm" in setting and num_heads == 16 else num_heads, 8, 128)
    cases = mixed_steps(spec)
    backend = build(setting, cases[0], spec)
    if not backend.captures_chunks:
        assert "torch" in setting
        return
    run = CapturedRun(backend, CaptureShape(512, 64, 32), cases, spec, return_lse=has_lse(setting))
    for case in cases:
        run.replay(case)
        rest = run.out[max(len(case.q), 64) :]
        assert rest.isnan().all(), "tokens of no sequence are left alone"


@pytest.mark.parametrize("setting", ["fi", "cake", "fi,cake", "cake,fi"])
def test_captured_mixed_steps_with_8_bit_pages_and_with_windows(setting: str) -> None:
    for spec, options in ((make_spec(32, 8, 128), FP8), (make_spec(32, 8, 128, sliding_window=100), {})):
        cases = mixed_steps(spec, **options)[:8]
        run = CapturedRun(build(setting, cases[0], spec), CaptureShape(512, 64, 32), cases, spec, return_lse=True)
        for case in cases:
            run.replay(case)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_captured_mixed_steps_with_4_bit_pages(head_dim: int) -> None:
    spec = make_spec(32, 8, head_dim)
    cases = mixed_steps(spec, **FP4)[:8]
    run = CapturedRun(build("cake", cases[0], spec), CaptureShape(512, 64, 32), cases, spec, return_lse=True)
    for case in cases:
        run.replay(case)


def test_dirty_workspaces_do_not_show() -> None:
    """NaN in the partial results and ones in the plans' integers and in the lists, before each replay is planned."""
    spec = make_spec(32, 8, 128)
    cases = mixed_steps(spec)[:8]
    backend = build("fi", cases[0], spec)
    assert isinstance(backend, FlashInferBackend)
    run = CapturedRun(backend, CaptureShape(512, 64, 32), cases, spec, return_lse=True)
    for case in cases:
        for workspace in backend.planner.workspaces.values():
            workspace.floats.fill_(255)
            workspace.integers.fill_(1)
        for lists in backend._captured_lists.values():
            for tensor in (lists.starts, lists.pages, lists.last_page_lens, lists.query_starts):
                tensor.fill_(0)
        backend._planned_decodes = None  # what it has planned is no longer there
        run.replay(case)


def test_layers_of_two_kinds_share_a_step() -> None:
    specs = [make_spec(32, 8, 128), make_spec(32, 8, 128, sliding_window=100)]
    cases = [make_case(spec, [1, 1, 60], [500, 17, 300], 2, dtype=BF16, device="cuda") for spec in specs]
    backend = build("fi", cases[0], *specs)
    plan = backend.plan(cases[0].batch)
    for spec, case in zip(specs, cases, strict=True):
        output, lse = backend.forward(case.q, case.layer_kv, plan, spec, return_lse=True)
        check(output, lse, case, spec, backend)


def test_half_precision() -> None:
    spec = make_spec(32, 8, 128)
    case = make_case(spec, [1, 1, 60], [500, 17, 300], 2, dtype=torch.float16, device="cuda")
    run_eagerly("fi", case, spec)


CAKE_OPTIONS: list[dict[str, Any]] = [{}, {"sliding_window": 100}, {"softcap": 5.0}]


@pytest.mark.parametrize("option", CAKE_OPTIONS, ids=["sinks", "sinks and window", "sinks and cap"])
@pytest.mark.parametrize(("num_heads", "head_dim"), [(64, 64), (32, 128), (8, 256), (40, 80), (8, 96)])
def test_sinks_of_cake(num_heads: int, head_dim: int, option: dict[str, Any]) -> None:
    sinks = torch.linspace(-4, 8, num_heads, device="cuda")
    spec = make_spec(num_heads, 8, head_dim, sinks=sinks, **option)
    query_lens, key_lens = [1] * len(LENS) + CHUNKS[0], LENS + CHUNKS[1]
    run_eagerly("cake", make_case(spec, query_lens, key_lens, len(LENS), dtype=BF16, device="cuda"), spec)


@pytest.mark.parametrize("page_size", [1, 3, 16, 64, 256])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("options", [{}, FP8], ids=["16 bits", "8 bits"])
def test_chunks_of_cake(options: dict[str, Any], head_dim: int, page_size: int) -> None:
    """Lengths at the edges of tiles and blocks of 128, 64 and 32, in windows and without."""
    query_lens, key_lens = [1, 31, 32, 33, 128, 129, 700], [257, 31, 160, 129, 128, 4000, 700]
    for group, window in ((4, None), (3, 200), (1, None)):
        spec = make_spec(group * 2, 2, head_dim, sliding_window=window)
        case = make_case(spec, query_lens, key_lens, 0, page_size=page_size, dtype=BF16, device="cuda", **options)
        run_eagerly("cake", case, spec)


@pytest.mark.parametrize(("dtype", "head_dim"), [(torch.float32, 128), (torch.float16, 128), (BF16, 320), (BF16, 512)])
def test_dtypes_and_large_heads_of_cake(dtype: torch.dtype, head_dim: int) -> None:
    spec = make_spec(8, 2, head_dim)
    run_eagerly("cake", make_case(spec, [1, 1, 40, 200], [9, 400, 40, 500], 2, dtype=dtype, device="cuda"), spec)


@pytest.mark.parametrize("option", [{}, {"sliding_window": 100}], ids=["all keys", "window"])
@pytest.mark.parametrize("options", [{}, FP8, FP4], ids=["16 bits", "8 bits", "4 bits"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_captured_drafts_of_cake(head_dim: int, options: dict[str, Any], option: dict[str, Any]) -> None:
    """Chunks of up to eight queries have their keys split, beside decodes, longer chunks and none of all these."""
    spec = make_spec(32, 8, head_dim, **option)
    sizes: list[Any] = [
        ([1, 1, 8, 5, 300], [9, 4000, 5000, 33, 700], 2),
        ([6] * 20, [300 * i + 6 for i in range(20)], 0),
        ([1] * 5, [100] * 5, 5),
        ([9, 2], [900, 2], 0),
    ]
    cases = [make_case(spec, *size, dtype=BF16, device="cuda", seed=seed, **options) for seed, size in enumerate(sizes)]
    backend = build("cake", cases[0], spec, max_drafts=7)
    run = CapturedRun(backend, CaptureShape(512, 64, 32), cases, spec, return_lse=True)
    for case in [*cases, *reversed(cases)]:
        run.replay(case)


def test_a_long_prompt_of_cake() -> None:
    """Whole, and its last part behind what is cached."""
    spec = make_spec(32, 8, 128)
    for size in (([8192], [8192]), ([512], [20_000])):
        run_eagerly("cake", make_case(spec, *size, 0, dtype=BF16, device="cuda"), spec)


@pytest.mark.parametrize("window", [None, 128])
@pytest.mark.parametrize("setting", [setting for setting in HERE if setting in ("fa,cake", "torch,cake", "cake")])
def test_steps_of_gpt_oss(setting: str, window: int | None) -> None:
    """Heads, sinks and windows of its layers: prompts and decodes, replayed too where prompts can be captured."""
    spec = make_spec(64, 8, 64, sinks=torch.linspace(-4, 8, 64, device="cuda"), sliding_window=window)
    cases = mixed_steps(spec)[:8]
    for case in cases[:4]:
        run_eagerly(setting, case, spec)
    backend = build(setting, cases[0], spec)
    if not backend.captures_chunks:
        assert setting == "torch,cake"
        return
    run = CapturedRun(backend, CaptureShape(512, 64, 32), cases, spec, return_lse=True)
    for case in cases:
        run.replay(case)


def test_cake_over_what_others_left_in_its_workspace() -> None:
    """Bitwise the same twice; batches that are all full blocks, all tails, and both."""
    spec = make_spec(32, 8, 128)
    for options in ({}, FP8):
        for key_lens in ([64, 128, 4096, 1024], [1, 63, 65, 4095], [64, 1, 4096, 77]):
            case = make_case(spec, [1] * 4, key_lens, 4, dtype=BF16, device="cuda", **options)
            pair = build("torch,cake", case, spec)
            assert isinstance(pair, HybridBackend)
            backend = pair._decode
            assert isinstance(backend, CakeBackend)
            outputs = []
            for dirt in (torch.nan, torch.inf):
                assert backend._decodes is not None
                backend._decodes._partials.outs.fill_(dirt)
                backend._decodes._partials.lses.fill_(dirt)
                plan = backend.plan(case.batch)
                output, lse = backend.forward(case.q, case.layer_kv, plan, spec, return_lse=True)
                check(output, lse, case, spec, backend)
                outputs.append(output)
            assert torch.equal(*outputs)


@pytest.mark.alone
def test_planning_a_replay_is_short_and_waits_for_nothing() -> None:
    """320 decodes and 319, so that no plan is kept. The device is idle, so no time is spent waiting for it.

    The best of 50: 0.2 to 0.4 ms, for hosts of one kind differ by a factor of two. A step may hold the loop for 2 ms.
    """
    spec = make_spec(32, 8, 128)
    case = make_case(spec, [1] * 320, [500] * 320, 320, dtype=BF16, device="cuda")
    backend = build("fi", case, spec, max_num_seqs=320)
    captured = CapturedCase.make(CaptureShape(320, 320, 0), 300, 16, "cuda")
    plan = backend.prepare_capture(captured.shape, captured.tables)
    full = captured.fill(case, 0)
    steps = (full, StepLens(full.key_lens, full.cu_query_lens - 1))
    times = []
    torch.cuda.set_sync_debug_mode("error")
    try:
        for i in range(50):
            start = time.perf_counter()
            backend.prepare_replay(plan, steps[i % 2])
            times.append(time.perf_counter() - start)
            time.sleep(0.001)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert min(times) < 0.5e-3, times

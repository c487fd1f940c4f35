"""Which calls of the GPU backends work on this machine: prints a line each. Run with PYTHONPATH=.:tests."""

import argparse
import dataclasses
import time
import traceback
from collections.abc import Callable

import torch
from doubles_attention import CapturedCase, PagedCase, dense_attention, make_case, make_spec
from torch import Tensor

from aserve.attention.base import AttentionBackend, AttentionProblem, AttentionSpec, CaptureShape
from aserve.attention.merge import convert_lse
from aserve.attention.registry import resolve_backend

CUDA = torch.device("cuda")


def backend_for(setting: str, case: PagedCase, *specs: AttentionSpec) -> AttentionBackend:
    problem = AttentionProblem(
        "cuda",
        case.q.dtype,
        case.layer_kv.key.dtype,
        case.batch.page_size,
        tuple(spec.kind for spec in specs),
        torch.cuda.get_device_capability(),
        max_num_seqs=64,
        max_num_tokens=4096,
    )
    return resolve_backend(setting, problem, CUDA)


def worst(output: Tensor, lse: Tensor, case: PagedCase, spec: AttentionSpec, backend: AttentionBackend) -> str:
    expected, expected_lse = dense_attention(case, spec)
    rows = len(expected)
    error = (output[:rows].double().cpu() - expected).abs().max().item()
    lse_error = (convert_lse(lse[:rows], backend.lse_base, "e").double().cpu() - expected_lse).abs().max().item()
    verdict = "ok" if error < 2e-2 * max(1.0, expected.abs().max().item()) and lse_error < 2e-2 else "WRONG"
    return f"{verdict} error {error:.4f} lse {lse_error:.4f}"


def run_eagerly(setting: str, case: PagedCase, spec: AttentionSpec, *, return_lse: bool = True) -> str:
    backend = backend_for(setting, case, spec)
    output, lse = backend.forward(case.q, case.layer_kv, backend.plan(case.batch), spec, return_lse=return_lse)
    return worst(output, lse, case, spec, backend) if lse is not None else "ok without lse"


def run_captured(setting: str, shape: CaptureShape, cases: list[PagedCase], spec: AttentionSpec) -> str:
    """Capture once, replay for all ``cases`` with NaN in the output before."""
    backend = backend_for(setting, cases[0], spec)
    page_size = cases[0].batch.page_size
    width = max(case.batch.page_table.shape[1] for case in cases) + 3
    captured = CapturedCase.make(shape, width, page_size, "cuda")
    num_pages = max(len(case.layer_kv.key) for case in cases)
    pages = [cases[0].layer_kv.key.new_zeros(num_pages + 1, *cases[0].layer_kv.key.shape[1:]) for _ in range(2)]
    layer_kv = dataclasses.replace(cases[0].layer_kv, key=pages[0], value=pages[1])
    q = cases[0].q.new_zeros(shape.num_tokens, spec.num_heads, spec.head_dim)
    out = torch.full_like(q, torch.nan)
    plan = backend.prepare_capture(shape, captured.tables)
    backend.prepare_replay(plan, captured.fill(cases[0], num_pages))

    def forward() -> Tensor:
        backend.convert(plan)
        lse = backend.forward(q, layer_kv, plan, spec, return_lse=True, out=out)[1]
        assert lse is not None
        return lse

    forward()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        lse = forward()
    results = []
    plan_us = 0.0
    for case in cases:
        out.fill_(torch.nan)
        for mine, theirs in zip(pages, (case.layer_kv.key, case.layer_kv.value), strict=True):
            mine[: len(theirs)] = theirs
        q[: len(case.q)] = case.q
        lens = captured.fill(case, num_pages)
        torch.cuda.synchronize()
        start = time.perf_counter()
        backend.prepare_replay(plan, lens)
        plan_us = (time.perf_counter() - start) * 1e6
        graph.replay()
        results.append(worst(out, lse, case, spec, backend))
    wrong = [f"step {i}: {result}" for i, result in enumerate(results) if not result.startswith("ok")]
    return "; ".join(wrong) or f"ok {len(results)} steps, last {results[-1]}, plan {plan_us:.0f} us"


def decodes(spec: AttentionSpec, key_lens: list[int], **options: object) -> PagedCase:
    return make_case(spec, [1] * len(key_lens), key_lens, len(key_lens), device="cuda", **bf16(options))


def mixed(spec: AttentionSpec, **options: object) -> PagedCase:
    return make_case(spec, [1, 1, 1, 30, 17, 300], [1, 33, 257, 30, 50, 700], 3, device="cuda", **bf16(options))


def bf16(options: dict[str, object]) -> dict[str, object]:
    return {"dtype": torch.bfloat16} | options  # type: ignore[return-value]


def checks(setting: str) -> dict[str, Callable[[], str]]:
    wide, narrow, plain = make_spec(32, 8, 128), make_spec(14, 2, 64), make_spec(16, 8, 128)
    fp8: dict[str, object] = {"kv_dtype": torch.float8_e4m3fn, "scales": (0.25, 0.5)}
    lens = [1, 15, 16, 17, 257, 4096]
    steps = [decodes(wide, lens), decodes(wide, [1]), decodes(wide, [5000, 3, 40]), decodes(wide, [9] * 8)]
    plain_steps = [decodes(plain, lens), decodes(plain, [1]), decodes(plain, [5000, 3, 40]), decodes(plain, [9] * 8)]
    mixed_steps = [
        mixed(wide),
        make_case(wide, [1, 1, 7], [9, 40, 7], 2, device="cuda", dtype=torch.bfloat16),
        make_case(wide, [400], [900], 0, device="cuda", dtype=torch.bfloat16),
        make_case(wide, [1] * 9 + [2, 1], [33] * 9 + [2, 65], 9, device="cuda", dtype=torch.bfloat16),
    ]
    return {
        "decodes g4 d128": lambda: run_eagerly(setting, decodes(wide, lens), wide),
        "decodes without lse": lambda: run_eagerly(setting, decodes(wide, lens), wide, return_lse=False),
        "decodes g2 d128": lambda: run_eagerly(setting, decodes(plain, lens), plain),
        "decodes g7 d64 page 1": lambda: run_eagerly(setting, decodes(narrow, lens, page_size=1), narrow),
        "decodes 40,000 keys": lambda: run_eagerly(setting, decodes(wide, [40_000]), wide),
        "mixed g4": lambda: run_eagerly(setting, mixed(wide), wide),
        "mixed g7 d64 page 64": lambda: run_eagerly(setting, mixed(narrow, page_size=64), narrow),
        "fp8 decodes g4": lambda: run_eagerly(setting, decodes(wide, lens, **fp8), wide),
        "fp8 mixed g4": lambda: run_eagerly(setting, mixed(wide, **fp8), wide),
        "fp8 mixed g2": lambda: run_eagerly(setting, mixed(plain, **fp8), plain),
        "captured decodes g4": lambda: run_captured(setting, CaptureShape(8, 8, 0), steps, wide),
        "captured decodes g4, no splits": lambda: run_captured(setting, CaptureShape(64, 64, 0), steps * 3, wide),
        "captured decodes g2": lambda: run_captured(setting, CaptureShape(8, 8, 0), plain_steps, plain),
        "captured mixed g4": lambda: run_captured(setting, CaptureShape(512, 64, 32), mixed_steps * 2, wide),
        "captured mixed g2": lambda: run_captured(
            setting, CaptureShape(512, 64, 32), [mixed(plain), *plain_steps, mixed(plain, seed=5)], plain
        ),
        "captured mixed g4 fp8": lambda: run_captured(
            setting, CaptureShape(512, 64, 32), [mixed(wide, **fp8)] * 3, wide
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("settings", nargs="*", default=["fi"])
    parser.add_argument("--traceback", action="store_true")
    arguments = parser.parse_args()
    for setting in arguments.settings:
        for name, check in checks(setting).items():
            start = time.perf_counter()
            try:
                result = check()
            except Exception as error:
                result = f"ERROR {type(error).__name__}: {str(error)[:300]}"
                if arguments.traceback:
                    traceback.print_exc()
            print(f"{setting:10} {name:32} {time.perf_counter() - start:6.2f} s  {result}", flush=True)


if __name__ == "__main__":
    main()

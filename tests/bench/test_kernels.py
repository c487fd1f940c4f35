"""``aserve bench kernels``: its cases, its reference and its reports, on the backends that a CPU has."""

import json
from typing import Any

import pytest
import torch
from doubles_attention import PagedCase, dense_attention, make_spec

from aserve.attention.base import KVOrder
from aserve.attention.registry import BACKENDS
from aserve.attention.torch_backend import TorchBackend
from aserve.bench import kernels
from aserve.bench.attention_case import AttentionCase, AttentionSetup, StepShape, make_case
from aserve.bench.device_speed import copy_bandwidth, time_calls
from aserve.cli import main
from aserve.kernels.nvfp4 import NVFP4

CPU = torch.device("cpu")
SHAPES = [("decode", "3x37"), ("decode", "3x5..37"), ("decode", "1x1"), ("prefill", "2x19"), ("prefill", "2x5+30")]
SMALL = ["--device", "cpu", "--num-threads", "1", "--rounds", "2", "--heads", "4/2", "--head-dim", "16"]


def setup(
    page_size: int = 4, dtype: torch.dtype = torch.float32, kv_dtype: torch.dtype | None = None
) -> AttentionSetup:
    return AttentionSetup(CPU, dtype, kv_dtype or dtype, 6, 2, 16, page_size)


def as_dense(case: AttentionCase) -> PagedCase:
    """The same case for the float64 reference of the backends' own tests."""
    dense: list[list[torch.Tensor]] = []
    for pool in (case.layer_kv.key, case.layer_kv.value):
        rows = pool.to(torch.float64)
        dense.append(
            [
                torch.stack([rows[pages[p // len(rows[0])], p % len(rows[0])] for p in range(key_len)])
                for pages, key_len in zip(case.batch.page_table.tolist(), case.batch.key_lens, strict=True)
            ]
        )
    return PagedCase(case.batch, case.layer_kv, case.queries, dense[0], dense[1])


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize(("phase", "text"), SHAPES)
def test_the_reference_equals_the_one_in_float64(phase: Any, text: str, page_size: int) -> None:
    case = make_case(setup(page_size), StepShape.parse(phase, text))
    expected, _ = dense_attention(as_dense(case), make_spec(6, 2, 16))
    assert torch.allclose(case.reference().double(), expected.double(), atol=2e-6)


def test_the_reference_is_the_same_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case(setup(), StepShape.parse("prefill", "2x19+30"))
    whole = case.reference()
    monkeypatch.setattr("aserve.bench.attention_case.MAX_SCORES", 6 * 49 * 4)
    assert torch.allclose(case.reference(), whole, atol=1e-6)


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_the_reference_reads_the_rounded_pages(kv_dtype: torch.dtype) -> None:
    case = make_case(setup(4, torch.bfloat16, kv_dtype), StepShape.parse("decode", "2x21"))
    assert case.layer_kv.key.dtype is kv_dtype
    expected, _ = dense_attention(as_dense(case), make_spec(6, 2, 16))
    assert torch.allclose(case.reference().double(), expected.double(), atol=2e-6)


@pytest.mark.parametrize("order", ["NHD", "HND"])
def test_pages_of_nvfp4_are_what_the_torch_backend_reads(order: KVOrder) -> None:
    """Which is tested against the format's table; elements of a head take 18 bytes, not 128."""
    nvfp4 = AttentionSetup(CPU, torch.float32, NVFP4, 6, 2, 32, 4)
    shape = StepShape.parse("decode", "2x21")
    case = make_case(nvfp4, shape)
    backend = TorchBackend(nvfp4.problem(shape), CPU)
    layer_kv = case.in_order("NHD")
    output, _ = backend.forward(case.queries, layer_kv, backend.plan(case.batch), nvfp4.spec)
    assert torch.allclose(output, case.reference(), atol=2e-6)
    assert nvfp4.moved_bytes(shape) == 2 * 2 * 6 * 32 * 4 + 2 * 42 * 2 * 18
    blocks, copied = case.layer_kv.block_scales, case.in_order(order).block_scales
    assert blocks is not None
    assert copied is not None
    assert torch.equal(copied.key.view(torch.uint8), blocks.key.view(torch.uint8))
    assert copied.key.data_ptr() != blocks.key.data_ptr()
    assert copied.key.transpose(1, 2).is_contiguous() == (order == "HND")


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.float8_e4m3fn])
@pytest.mark.parametrize("order", ["NHD", "HND"])
def test_pages_lie_in_the_order_that_a_backend_wants(order: KVOrder, kv_dtype: torch.dtype) -> None:
    case = make_case(setup(kv_dtype=kv_dtype), StepShape.parse("decode", "2x21"))
    layer_kv = case.in_order(order)
    assert torch.equal(layer_kv.key.float(), case.layer_kv.key.float())
    assert torch.equal(layer_kv.value.float(), case.layer_kv.value.float())
    assert layer_kv.key.data_ptr() != case.layer_kv.key.data_ptr()
    lies = layer_kv.value if order == "NHD" else layer_kv.value.transpose(1, 2)
    assert lies.is_contiguous()


@pytest.mark.parametrize(
    ("phase", "text", "moved", "operations"),
    [
        # queries and output 6 x 16 x 4 bytes each; keys and values 2 x 16 x 4 bytes each
        ("decode", "3x37", 3 * (2 * 384 + 37 * 256), 3 * 37 * 6 * 16 * 4),
        ("decode", "3x1..5", 3 * 2 * 384 + (1 + 3 + 5) * 256, (1 + 3 + 5) * 6 * 16 * 4),
        ("prefill", "1x3+2", 3 * 2 * 384 + 5 * 256, (3 + 4 + 5) * 6 * 16 * 4),
    ],
)
def test_bytes_and_operations_are_counted(phase: Any, text: str, moved: int, operations: int) -> None:
    shape = StepShape.parse(phase, text)
    assert setup().moved_bytes(shape) == moved
    assert setup().operations(shape) == operations
    assert str(shape) == text


@pytest.mark.parametrize(
    ("phase", "text"),
    [
        ("decode", "3"),
        ("decode", "0x5"),
        ("decode", "2x5+3"),
        ("decode", "2x5..4"),
        ("prefill", "2x3..5"),
        ("prefill", "2x0"),
        ("prefill", "axb"),
    ],
)
def test_other_texts_are_no_shapes(phase: Any, text: str) -> None:
    with pytest.raises(ValueError, match="is not BATCHx"):
        StepShape.parse(phase, text)


def test_every_backend_is_measured_or_refused_with_its_reason(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "kernels", *SMALL, "--decode", "3x40", "--prefill", "1x20", "2x8+9", "--json", "-"]) == 0
    result = json.loads(capsys.readouterr().out)
    usable = [name for name, reason in BACKENDS.refusals().items() if reason is None]
    assert {"torch", "cpu"} <= set(usable)
    seen = {(row["backend"], row["phase"], row["shape"]) for row in result["results"]}
    shapes = [("decode", "3x40"), ("prefill", "1x20"), ("prefill", "2x8+9")]
    assert {(name, *shape) for name in ("torch", "cpu") for shape in shapes} <= seen
    for row in result["results"]:
        assert row["max_error"] < 1e-5
        assert row["rel_error"] < 1e-5
        moved = setup_of(row).moved_bytes(StepShape.parse(row["phase"], row["shape"]))
        assert row["gb_s"] == pytest.approx(moved / row["time_us"] / 1e3)
        assert row["of_copy"] == pytest.approx(row["gb_s"] / result["limits"]["copy_gb_s"])
        assert row["of_matmul"] == pytest.approx(row["tflop_s"] / result["limits"]["matmul_float32_tflop_s"])
        assert row["plan_us"] > 0
    refused = {row["backend"]: row["refused"] for row in result["refused"]}
    assert refused.keys() == set(BACKENDS.names) - {"torch", "cpu"}
    assert all(refused.values())


def setup_of(row: dict[str, Any]) -> AttentionSetup:
    return AttentionSetup(CPU, torch.float32, torch.float32, 4, 2, 16, row["page"])


def test_a_wrong_result_shows_as_an_error_and_a_broken_kernel_as_failed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    forward = TorchBackend.forward

    def wrong(self: TorchBackend, q: torch.Tensor, *rest: Any, **options: Any) -> Any:
        if len(q) == 7:
            raise RuntimeError("no such kernel")
        output, lse = forward(self, q, *rest, **options)
        return output * 1.01, lse

    monkeypatch.setattr(TorchBackend, "forward", wrong)
    assert main(["bench", "kernels", *SMALL, "--backends", "torch", "--decode", "3x40", "7x9", "--json", "-"]) == 1
    right, broken = json.loads(capsys.readouterr().out)["results"]
    assert right["rel_error"] == pytest.approx(0.01, rel=1e-3)
    assert broken["failed"] == "RuntimeError: no such kernel"
    assert main(["bench", "kernels", *SMALL, "--backends", "torch", "fi", "--decode", "7x9", "3x40"]) == 1
    text = capsys.readouterr().out
    assert "torch failed at decode 7x9, 4/2 x 16, page 16: RuntimeError: no such kernel" in text
    assert "fi refused for decode: " in text
    assert "| torch | decode | 3x40 |" in text


def test_a_backend_that_refuses_a_shape_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    flags = [
        "--device",
        "cpu",
        "--num-threads",
        "1",
        "--rounds",
        "1",
        "--head-dim",
        "512",
        "--heads",
        "2/1",
        "--decode",
        "1x9",
    ]
    assert main(["bench", "kernels", *flags, "--backends", "cpu", "torch"]) == 0
    assert "cpu refused for decode: head_dim 512 is above 256" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--backends", "fast"], "unknown attention backend 'fast'; known: torch, cpu"),
        (["--decode", "5"], "'5' is not BATCHxKEYS"),
    ],
)
def test_what_is_not_there_is_named(flags: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "kernels", *SMALL, *flags]) == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize("value", ["8", "8/3", "x/2", "0/1"])
def test_heads_that_cannot_be_are_refused(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "kernels", "--heads", value])
    assert "--heads" in capsys.readouterr().err


def test_pages_that_calls_go_through_are_larger_than_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case(setup(), StepShape.parse("decode", "2x21"))
    size = 2 * case.layer_kv.key.numel() * 4
    monkeypatch.setattr(kernels, "MAX_COPIES", 64)
    monkeypatch.setattr(kernels, "cache_bytes", lambda device: 10 * size)
    assert kernels._num_copies(case) == kernels.CACHE_TURNS * 10
    monkeypatch.setattr(kernels, "cache_bytes", lambda device: 1)
    assert kernels._num_copies(case) == kernels.MIN_COPIES


@pytest.mark.alone
def test_times_are_those_of_one_call() -> None:
    import time

    calls = [lambda: time.sleep(0.01), lambda: time.sleep(0.03)]
    assert time_calls(CPU, calls, 3) == pytest.approx(0.02, rel=0.2)
    assert copy_bandwidth(CPU, 1) > 1e8

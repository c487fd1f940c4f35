"""A hybrid of two recorded backends, one of which speaks base 2."""

from typing import Any

import pytest
import torch
from doubles_attention import CapturedCase, dense_attention, make_case, make_problem, make_spec, torch_backend
from torch import Tensor

from aserve.attention.base import (
    AttentionBackend,
    AttentionBatch,
    AttentionSpec,
    CaptureShape,
    LayerKV,
    LseBase,
    StepLens,
    StepTables,
)
from aserve.attention.hybrid import HybridBackend
from aserve.attention.merge import convert_lse


class RecordingBackend(AttentionBackend):
    """Computes like the torch backend, reports LSEs in ``lse_base`` and notes the batches that it plans."""

    def __init__(self, name: str, lse_base: LseBase) -> None:
        super().__init__(make_problem(), torch.device("cpu"))
        self.name = name
        self.lse_base = lse_base
        self.batches: list[AttentionBatch] = []
        self._torch = torch_backend()

    def plan(self, batch: AttentionBatch) -> Any:
        self.batches.append(batch)
        return self._torch.plan(batch)

    def forward(
        self,
        q: Tensor,
        layer_kv: LayerKV,
        plan: Any,
        spec: AttentionSpec,
        *,
        return_lse: bool = False,
        out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        output, lse = self._torch.forward(q, layer_kv, plan, spec, return_lse=return_lse, out=out)
        return output, None if lse is None else convert_lse(lse, "e", self.lse_base)


@pytest.fixture
def prefill() -> RecordingBackend:
    return RecordingBackend("one", "2")


@pytest.fixture
def decode() -> RecordingBackend:
    return RecordingBackend("two", "2")


@pytest.mark.parametrize(
    ("query_lens", "key_lens", "num_decodes"),
    [([1, 1, 7, 20], [9, 40, 7, 33], 2), ([1, 1], [9, 40], 2), ([7, 20], [7, 33], 0), ([1, 1, 1], [50, 1, 3], 1)],
)
def test_each_slice_goes_to_its_own_backend(
    prefill: RecordingBackend,
    decode: RecordingBackend,
    query_lens: list[int],
    key_lens: list[int],
    num_decodes: int,
) -> None:
    spec = make_spec(4, 2, 64)
    case = make_case(spec, query_lens, key_lens, num_decodes)
    hybrid = HybridBackend(prefill, decode)
    output, lse = hybrid.forward(case.q, case.layer_kv, hybrid.plan(case.batch), spec, return_lse=True)
    expected, expected_lse = dense_attention(case, spec)
    torch.testing.assert_close(output.double(), expected, rtol=2e-5, atol=2e-5)
    assert hybrid.lse_base == "e"
    assert lse is not None
    torch.testing.assert_close(lse.double(), expected_lse, rtol=2e-5, atol=2e-5)
    assert [batch.key_lens for batch in decode.batches] == ([key_lens[:num_decodes]] if num_decodes else [])
    chunks = key_lens[num_decodes:]
    assert [batch.key_lens for batch in prefill.batches] == ([chunks] if chunks else [])
    _, no_lse = hybrid.forward(case.q, case.layer_kv, hybrid.plan(case.batch), spec)
    assert no_lse is None


def test_the_slices_are_batches_of_their_own(prefill: RecordingBackend, decode: RecordingBackend) -> None:
    case = make_case(make_spec(1, 1, 64), [1, 1, 7, 20], [40, 9, 7, 33], 2)
    HybridBackend(prefill, decode).plan(case.batch)
    (decodes,), (chunks,) = decode.batches, prefill.batches
    assert (decodes.num_decodes, chunks.num_decodes) == (2, 0)
    assert (decodes.query_lens, chunks.query_lens) == ([1, 1], [7, 20])
    assert (decodes.cu_query_lens.tolist(), chunks.cu_query_lens.tolist()) == ([0, 1, 2], [0, 7, 27])
    assert decodes.cu_key_lens is not None
    assert chunks.cu_key_lens is not None
    assert (decodes.cu_key_lens.tolist(), chunks.cu_key_lens.tolist()) == ([0, 40, 49], [0, 7, 40])
    assert (decodes.key_lens_device.tolist(), chunks.key_lens_device.tolist()) == ([40, 9], [7, 33])
    assert (decodes.page_table.shape, chunks.page_table.shape) == ((2, 3), (2, 3))


def test_capture_and_replay_of_decodes_belong_to_the_decode_backend(prefill: RecordingBackend) -> None:
    spec = make_spec(2, 1, 64)
    assert not HybridBackend(torch_backend(), prefill).captures_decodes
    hybrid = HybridBackend(prefill, torch_backend())
    assert hybrid.captures_decodes
    assert not hybrid.captures_chunks
    captured = CapturedCase.make(CaptureShape(2, 2, 0), 4, 16)
    plan = hybrid.prepare_capture(captured.shape, captured.tables)
    case = make_case(spec, [1, 1], [3, 50], 2, seed=5)
    hybrid.prepare_replay(plan, captured.fill(case, 0))
    hybrid.convert(plan)
    output, _ = hybrid.forward(case.q, case.layer_kv, plan, spec)
    torch.testing.assert_close(output.double(), dense_attention(case, spec)[0], rtol=2e-5, atol=2e-5)
    assert not prefill.batches


class NotingBackend(RecordingBackend):
    """Captures everything and notes what it is given; ``log`` is shared, so that it shows the order."""

    captures_decodes = True
    captures_chunks = True

    def __init__(self, name: str, log: list[tuple[Any, ...]]) -> None:
        super().__init__(name, "e")
        self.log = log

    def prepare_capture(self, shape: CaptureShape, tables: StepTables) -> Any:
        self.log.append(
            (self.name, shape, tables.rows.tolist(), tables.key_lens.tolist(), tables.cu_query_lens.tolist())
        )
        return f"{self.name}'s"

    def convert(self, plan: Any) -> None:
        self.log.append((self.name, "convert", plan))

    def prepare_replay(self, plan: Any, lens: StepLens) -> None:
        self.log.append((self.name, "replay", plan, lens.key_lens.tolist(), lens.cu_query_lens.tolist()))

    def forward(
        self, q: Tensor, *_: Any, out: Tensor | None = None, return_lse: bool = False, **__: Any
    ) -> tuple[Tensor, Tensor | None]:
        assert out is not None
        self.log.append((self.name, "forward", len(q), len(out)))
        return out, torch.full((len(q), 1), {"one": 1.0, "two": 2.0}[self.name]) if return_lse else None


def test_a_captured_mixed_step_gives_each_backend_its_section() -> None:
    """Decodes first: what they write to rows of chunks, the chunks overwrite. Only chunks see all tokens."""
    log: list[tuple[Any, ...]] = []
    hybrid = HybridBackend(NotingBackend("one", log), NotingBackend("two", log))
    assert hybrid.captures_chunks
    tables = StepTables(
        page_table=torch.zeros(6, 4, dtype=torch.int32),
        rows=torch.arange(5, dtype=torch.int32),
        key_lens=torch.tensor([9, 1, 1, 7, 0], dtype=torch.int32),
        cu_query_lens=torch.tensor([1, 8, 8], dtype=torch.int32),
        page_size=16,
    )
    plan = hybrid.prepare_capture(CaptureShape(10, 3, 2), tables)
    hybrid.prepare_replay(plan, StepLens(tables.key_lens.numpy(), tables.cu_query_lens.numpy()))
    hybrid.convert(plan)
    layer_kv = LayerKV(torch.zeros(1), torch.zeros(1))
    _, lse = hybrid.forward(torch.zeros(10, 1, 64), layer_kv, plan, make_spec(1, 1, 64), return_lse=True)
    assert lse is not None
    assert lse[:8].flatten().tolist() == [2.0, *[1.0] * 7], "the only decode's is its own backend's"
    assert log == [
        ("two", CaptureShape(3, 3, 0), [0, 1, 2], [9, 1, 1], [1, 8, 8]),
        ("one", CaptureShape(10, 0, 2), [3, 4], [7, 0], [1, 8, 8]),
        ("two", "replay", "two's", [9, 1, 1], [1, 8, 8]),
        ("one", "replay", "one's", [7, 0], [1, 8, 8]),
        ("two", "convert", "two's"),
        ("one", "convert", "one's"),
        ("two", "forward", 3, 3),
        ("one", "forward", 10, 10),
    ]


def test_a_backend_without_capture_says_so(prefill: RecordingBackend) -> None:
    captured = CapturedCase.make(CaptureShape(1, 1, 0), 1, 16)
    assert not prefill.captures_decodes
    with pytest.raises(NotImplementedError, match="one does not capture"):
        prefill.prepare_capture(captured.shape, captured.tables)

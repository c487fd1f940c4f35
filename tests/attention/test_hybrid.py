"""A hybrid of two recorded backends, one of which speaks base 2."""

from typing import Any

import pytest
import torch
from doubles_attention import dense_attention, make_case, make_problem, make_spec, torch_backend
from torch import Tensor

from aserve.attention.base import AttentionBackend, AttentionBatch, AttentionSpec, LayerKV, LseBase
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
        self, q: Tensor, layer_kv: LayerKV, plan: Any, spec: AttentionSpec, *, return_lse: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        output, lse = self._torch.forward(q, layer_kv, plan, spec, return_lse=return_lse)
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


def test_capture_and_replay_belong_to_the_decode_backend(prefill: RecordingBackend) -> None:
    spec = make_spec(2, 1, 64)
    assert not HybridBackend(torch_backend(), prefill).supports_capture
    hybrid = HybridBackend(prefill, torch_backend())
    assert hybrid.supports_capture
    plan = hybrid.prepare_capture(make_case(spec, [1, 1], [64, 64], 2).batch)
    case = make_case(spec, [1, 1], [3, 50], 2, seed=5)
    hybrid.prepare_replay(plan, case.batch)
    output, _ = hybrid.forward(case.q, case.layer_kv, plan, spec)
    torch.testing.assert_close(output.double(), dense_attention(case, spec)[0], rtol=2e-5, atol=2e-5)
    assert not prefill.batches


def test_a_backend_without_capture_says_so(prefill: RecordingBackend) -> None:
    batch = make_case(make_spec(1, 1, 64), [1], [1], 1).batch
    with pytest.raises(NotImplementedError, match="one does not capture"):
        prefill.prepare_capture(batch)
    with pytest.raises(NotImplementedError, match="one does not capture"):
        prefill.prepare_replay(None, batch)

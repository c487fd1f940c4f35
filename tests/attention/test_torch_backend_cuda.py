"""The torch backend on a GPU: the same comparison, and a graph that is captured and replayed for real."""

import pytest
import torch
from doubles_attention import CapturedCase, dense_attention, make_case, make_spec, torch_backend

from aserve.attention.base import CaptureShape

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")


@pytest.mark.parametrize("page_size", [1, 16, 256])
@pytest.mark.parametrize("options", [{}, {"sliding_window": 16, "softcap": 3.0, "sinks": torch.linspace(-1, 2, 6)}])
def test_mixed_batches_equal_dense_attention(page_size: int, options: dict[str, object]) -> None:
    spec = make_spec(6, 2, 64, **{key: getattr(value, "cuda", lambda v=value: v)() for key, value in options.items()})
    case = make_case(spec, [1, 1, 1, 30, 17], [1, 33, 257, 30, 50], 3, page_size=page_size, device="cuda")
    backend = torch_backend("cuda")
    output, lse = backend.forward(case.q, case.layer_kv, backend.plan(case.batch), spec, return_lse=True)
    expected, expected_lse = dense_attention(case, spec)
    torch.testing.assert_close(output.double().cpu(), expected, rtol=2e-5, atol=2e-5)
    assert lse is not None
    torch.testing.assert_close(lse.double().cpu(), expected_lse, rtol=2e-5, atol=2e-5)


def test_a_captured_graph_replays_for_other_sequences() -> None:
    spec = make_spec(6, 2, 64, sliding_window=100)
    backend = torch_backend("cuda")
    largest = make_case(spec, [1] * 4, [128] * 4, 4, seed=9, device="cuda")
    captured = CapturedCase.make(CaptureShape(4, 4, 0), 8, 16, "cuda")
    captured.fill(largest, 0)
    plan = backend.prepare_capture(captured.shape, captured.tables)
    q = torch.zeros_like(largest.q)
    layer_kv = largest.layer_kv
    backend.convert(plan)
    for _ in range(2):  # warm-up outside of the graph
        backend.forward(q, layer_kv, plan, spec)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        backend.convert(plan)
        output, _ = backend.forward(q, layer_kv, plan, spec)
    for seed, key_lens in enumerate(([128, 120, 1, 77], [1, 1, 1, 1], [17, 3, 128, 64], [40, 5])):
        case = make_case(spec, [1] * len(key_lens), list(key_lens), len(key_lens), seed=seed, device="cuda")
        num_pages = len(case.layer_kv.key)
        layer_kv.key.fill_(torch.nan)
        layer_kv.value.fill_(torch.nan)
        layer_kv.key[:num_pages], layer_kv.value[:num_pages] = case.layer_kv.key, case.layer_kv.value
        q[: len(key_lens)].copy_(case.q)
        backend.prepare_replay(plan, captured.fill(case, dummy_page=int(case.batch.page_table[0, 0])))
        graph.replay()
        expected = dense_attention(case, spec)[0]
        torch.testing.assert_close(output[: len(key_lens)].double().cpu(), expected, rtol=2e-5, atol=2e-5)

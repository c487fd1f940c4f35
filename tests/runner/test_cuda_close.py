"""What the CUDA runner gives back when it is closed, played on a CPU."""

from pathlib import Path

import pytest
from doubles_attention import make_problem
from doubles_cuda import CPU, CapturingBackend, make_cuda_runner, play_cuda
from doubles_models import load_folder, make_oracle
from doubles_runner import make_runner


def test_graphs_are_destroyed_whoever_holds_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else NCCL, which waits for the last graph that has collectives in it, would not let a rank leave its group."""
    play_cuda(monkeypatch)
    make_oracle("llama", {"num_hidden_layers": 1}, tmp_path)
    backend = CapturingBackend(make_problem(), CPU)
    _, parts = make_runner(load_folder(tmp_path), max_num_tokens=8, num_pages=8, backend=backend)
    runner = make_cuda_runner(parts)
    bodies, heads = list(runner._graphs._bodies.values()), list(runner._graphs._heads.values())
    graphs = [body.graph for body in bodies] + [graph for head in heads for graph in (head.sampling, head.scoring)]
    assert len(graphs) == runner._graphs.sizes.count > 3
    assert not any(graph.is_reset for graph in graphs)  # type: ignore[attr-defined]
    runner.close()
    assert all(graph.is_reset for graph in graphs)  # type: ignore[attr-defined]

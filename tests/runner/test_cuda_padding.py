"""What replays of graphs write for padding in the CUDA runner, played on a CPU."""

from pathlib import Path

import pytest
import torch
from doubles_attention import make_problem
from doubles_cuda import CPU, CapturingBackend, make_cuda_runner, play_cuda
from doubles_models import load_folder, make_oracle
from doubles_runner import RandomDriver, Run, make_runner

from aserve.request import SamplingParams

pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")  # of numpy, in the interpreter


def test_a_replay_of_padding_writes_to_the_dummy_page_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After steps that left rows of real pages in every table."""
    play_cuda(monkeypatch)
    make_oracle("llama", {"num_hidden_layers": 1}, tmp_path)
    backend = CapturingBackend(make_problem(), CPU)
    _, parts = make_runner(load_folder(tmp_path), max_num_seqs=2, max_num_tokens=16, num_pages=20, backend=backend)
    runner = make_cuda_runner(parts)
    greedy = SamplingParams(temperature=0.0)
    RandomDriver(runner, [Run([3 + i, *range(8)], 2, greedy, i) for i in range(2)], seed=0).run()
    state, graphs = runner._state, runner._graphs
    assert all(row.lt(parts.num_pages).any() for row in state.page_table[:-1]), "a row was never used"
    pools = [pool for layer in parts.layers_kv for pool in (layer.key, layer.value)]
    shapes = list(graphs.sizes.shapes())
    assert {shape.num_chunks > 0 for shape in shapes} == {False, True}
    for shape in shapes:
        before = [pool.normal_().clone() for pool in pools]
        with torch.inference_mode():
            runner._body.replay(graphs._bodies[shape], runner._staging.send_padding(shape))
        for pool, kept in zip(pools, before, strict=True):
            assert torch.equal(pool[: parts.num_pages], kept[: parts.num_pages]), shape
            assert not torch.equal(pool[parts.num_pages], kept[parts.num_pages]), f"nothing was written: {shape}"
    runner.close()

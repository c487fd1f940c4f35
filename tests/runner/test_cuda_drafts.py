"""Drafts in the CUDA runner, played on a CPU: padded graphs and steps without one give the tokens without drafts."""

from pathlib import Path

import pytest
from doubles_attention import make_problem
from doubles_cuda import CPU, CapturingBackend, make_cuda_runner, play_cuda
from doubles_models import load_folder, make_oracle
from doubles_runner import RandomDriver, Run, make_runner

from aserve.models.decoder import Decoder
from aserve.request import SamplingParams

pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")  # of numpy, in the interpreter
PARAMS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.9),
    SamplingParams(temperature=1.2, logprobs=2, min_tokens=4),
]


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    folder: Path = tmp_path_factory.mktemp("tiny")
    make_oracle("llama", {"num_hidden_layers": 1}, folder)
    return load_folder(folder)


def drive(decoder: Decoder, params: list[SamplingParams], expected: list[list[int]], **options: bool) -> RandomDriver:
    """Run five sequences; with ``expected`` outputs they verify drafts made of these."""
    _, parts = make_runner(decoder, max_num_tokens=40, num_pages=40, backend=CapturingBackend(make_problem(), CPU))
    runner = make_cuda_runner(parts, max_num_drafts=12 if expected else 0, **options)
    runs = [Run([3 + i, 7, 2 * i, *range(i, i + 5 * i)], 9, params[i % len(params)], i) for i in range(5)]
    for run, outputs in zip(runs, expected, strict=False):
        run.expected = outputs
    driver = RandomDriver(runner, runs, seed=len(expected))
    driver.run()
    runner.close()
    driver.outputs = [run.outputs for run in runs]
    return driver


@pytest.mark.parametrize(("params", "has_graphs"), [(PARAMS[:2], True), (PARAMS, False)], ids=["graphs", "eager"])
def test_tokens_with_drafts_are_those_without(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch, params: list[SamplingParams], has_graphs: bool
) -> None:
    play_cuda(monkeypatch)
    without = drive(decoder, params, [], has_graphs=has_graphs)
    driver = drive(decoder, params, without.outputs, has_graphs=has_graphs)
    assert driver.outputs == without.outputs
    assert min(driver.num_accepted[count] for count in range(3)) > 0, driver.num_accepted
    assert driver.num_mixed_steps

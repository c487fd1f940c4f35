"""Tokens of random schedules equal those of transformers, which sees each sequence alone and dense."""

import random
from pathlib import Path
from typing import Any

import pytest
from doubles_attention import torch_backend
from doubles_models import load_folder, make_oracle
from doubles_runner import RandomDriver, Run, make_runner
from reference.margins import MIN_COMPARED, count_clear

from aserve.attention.hybrid import HybridBackend
from aserve.models.decoder import Decoder
from aserve.request import SamplingParams

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"num_hidden_layers": 2}),
    "mistral": ("mistral", {"num_hidden_layers": 2, "sliding_window": 9, "head_dim": 16}),
}


@pytest.fixture(scope="module", params=MODELS)
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Decoder]:
    """The same random checkpoint in transformers and here."""
    folder: Path = tmp_path_factory.mktemp(request.param)
    model_type, changes = MODELS[request.param]
    return make_oracle(model_type, changes, folder), load_folder(folder)


def make_runs(seed: int, count: int) -> list[Run]:
    source = random.Random(seed)
    return [
        Run(
            prompt=[source.randrange(99) for _ in range(source.randint(1, 40))],
            num_outputs=source.randint(1, 15),
            params=SamplingParams(temperature=0.0),
            seed=0,
        )
        for _ in range(count)
    ]


@pytest.mark.parametrize(("page_size", "num_pages"), [(1, 150), (4, 40), (16, 16)])
@pytest.mark.parametrize("seed", range(3))
def test_greedy_tokens_equal_transformers(
    models: tuple[Any, Decoder], page_size: int, num_pages: int, seed: int
) -> None:
    oracle, decoder = models
    backend = HybridBackend(torch_backend(), torch_backend()) if seed == 2 else torch_backend()
    runner, _ = make_runner(decoder, page_size=page_size, num_pages=num_pages, max_num_tokens=60, backend=backend)
    runs = make_runs(seed, 12)
    driver = RandomDriver(runner, runs, seed)
    driver.run()
    runner.close()
    assert driver.num_preemptions
    assert driver.num_mixed_steps
    num_clear = sum(count_clear(oracle, run.prompt, run.outputs) for run in runs)
    assert num_clear >= MIN_COMPARED * sum(run.num_outputs for run in runs)


def test_sampled_tokens_do_not_depend_on_the_schedule(models: tuple[Any, Decoder]) -> None:
    """Seeds, penalties and log probabilities: any two schedules agree, preempted or not."""
    _, decoder = models
    params = [
        SamplingParams(temperature=0.8),
        SamplingParams(temperature=1.2, top_k=20, repetition_penalty=1.3),
        SamplingParams(top_p=0.8, frequency_penalty=1.0, logprobs=2),
        SamplingParams(temperature=0.0, presence_penalty=1.5, min_tokens=8),
    ]
    results = []
    for schedule in range(3):
        runs = make_runs(7, 12)
        for i, run in enumerate(runs):
            run.params, run.seed = params[i % len(params)], i
        runner, _ = make_runner(decoder, max_num_tokens=50, num_pages=60)
        RandomDriver(runner, runs, schedule).run()
        runner.close()
        results.append([run.outputs for run in runs])
    assert results[0] == results[1] == results[2]
    assert len({tuple(outputs) for outputs in results[0]}) == 12


def test_tokens_with_drafts_are_those_without(models: tuple[Any, Decoder]) -> None:
    """Greedy, sampled and filtered rows; the drafts are what the first run picked, with mistakes in them."""
    _, decoder = models
    params = [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.8),
        SamplingParams(temperature=1.2, top_k=20, min_p=0.01, logit_bias={5: 3.0}),
        SamplingParams(top_p=0.8, logprobs=2, min_tokens=8),
    ]
    expected: list[list[int]] = [[]] * 12
    for schedule in range(3):
        runs = make_runs(7, 12)
        for i, run in enumerate(runs):
            run.params, run.seed, run.expected = params[i % len(params)], i, expected[i]
        runner, _ = make_runner(decoder, max_num_tokens=50, num_pages=60)
        driver = RandomDriver(runner, runs, schedule)
        driver.run()
        runner.close()
        outputs = [run.outputs for run in runs]
        assert outputs == (expected if schedule else outputs)
        assert schedule == 0 or min(driver.num_accepted[count] for count in range(3)) > 0, driver.num_accepted
        expected = outputs

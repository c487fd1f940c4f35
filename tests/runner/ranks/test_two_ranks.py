"""A tiny model on two gloo ranks, each a process: the tokens of transformers, whole groups of pages, and the end."""

import os
import signal
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from doubles_engine import LetterTokenizer
from doubles_models import make_oracle
from reference.margins import MIN_COMPARED, count_clear

from aserve.config import EngineConfig
from aserve.distributed.context_shard import ContextShard
from aserve.distributed.group import RankGroup
from aserve.engine.llm import LLM, CompletedOutput
from aserve.errors import ConfigError
from aserve.model_files import ModelFiles
from aserve.request import FinishReason, SamplingParams
from aserve.runner.ranks.build import build_ranks

PAGE_SIZE = 2  # of a rank
GROUP = 2 * PAGE_SIZE  # tokens of a page of the scheduler
NUM_PAGES = 30
GREEDY = SamplingParams(temperature=0.0, max_tokens=9)


class OpenTokenizer(LetterTokenizer):
    """Knows no end, so there are no grammars, for which other ranks would look for a tokenizer in the folder."""

    eos_token_ids = frozenset()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tiny")


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Any:
    return make_oracle("llama", {"num_hidden_layers": 2}, folder)


def settings(folder: Path, size: int = 2) -> EngineConfig:
    """A budget that cuts prompts into chunks, and pages that do not last for all sequences."""
    return EngineConfig(
        model=str(folder),
        device="cpu",
        dtype="float32",
        num_threads=1,
        decode_context_parallel_size=size,
        page_size=PAGE_SIZE,
        num_pages=NUM_PAGES,
        max_num_seqs=6,
        max_num_batched_tokens=16,
        max_model_len=64,
        trace_file=str(folder / "trace.jsonl"),
    )


@pytest.fixture(scope="module")
def llm(folder: Path, oracle: Any) -> Iterator[LLM]:
    with LLM(settings(folder), tokenizer=OpenTokenizer()) as llm:
        yield llm


def prompt_of(length: int, salt: int) -> list[int]:
    """Token ids that share no beginning with those of another ``salt``."""
    return [(salt * 13 + place * 7 + place * place) % 95 + 3 for place in range(length)]


def check(oracle: Any, prompts: Sequence[list[int]], outputs: Sequence[CompletedOutput]) -> None:
    """Each output token is the one that transformers finds likeliest after those before it, where that is clear."""
    num_clear = num_tokens = 0
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.error is None
        assert output.finish_reason is FinishReason.LENGTH
        num_clear += count_clear(oracle, prompt, output.token_ids)
        num_tokens += len(output.token_ids)
    assert num_clear > MIN_COMPARED * num_tokens


def test_prompts_around_the_borders_of_pages_and_groups_have_transformers_tokens(oracle: Any, llm: LLM) -> None:
    """One after the other, so that each is a step of its own; those above 16 tokens go in chunks."""
    lengths = [1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 33]
    prompts = [prompt_of(length, salt) for salt, length in enumerate(lengths)]
    check(oracle, prompts, [llm.generate([prompt], GREEDY)[0] for prompt in prompts])


def test_a_batch_under_preemption_has_transformers_tokens(oracle: Any, llm: LLM) -> None:
    prompts = [prompt_of(5 + salt, 20 + salt) for salt in range(9)]
    before = llm._engine.stats().scheduler.num_preemptions
    outputs = llm.generate(prompts, replace(GREEDY, max_tokens=32))
    stats = llm._engine.stats().scheduler
    assert stats.num_pages == NUM_PAGES
    assert stats.num_preemptions > before
    check(oracle, prompts, outputs)


@pytest.mark.parametrize(("length", "hit"), [(8, 4), (9, 8), (12, 8), (15, 12)])
def test_a_prefix_is_found_in_whole_groups(length: int, hit: int, oracle: Any, llm: LLM) -> None:
    """The last token is always computed; what stands behind the last whole group, too."""
    prompt = prompt_of(length, 40 + length)
    first, second = (llm.generate([prompt], GREEDY)[0] for _ in range(2))
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, hit)
    check(oracle, [prompt, prompt], [first, second])


def test_ranks_draw_the_same_tokens_with_any_parameters(llm: LLM) -> None:
    """Else the hashes of a step would differ, and the engine would be gone."""
    params = [
        SamplingParams(temperature=1.0, seed=seed, max_tokens=9, top_p=0.9, presence_penalty=0.5, logprobs=2)
        for seed in range(8)
    ]
    outputs = llm.generate([prompt_of(6, 60)] * 8, params)
    assert {len(output.token_ids) for output in outputs} == {9}
    assert len({tuple(output.token_ids) for output in outputs}) > 4
    assert llm._engine.failure is None


def test_a_pool_of_ranks_takes_as_many_times_the_tokens(llm: LLM) -> None:
    limits = llm._engine.limits
    assert (limits.page_size, limits.num_pages) == (GROUP, NUM_PAGES)


def test_a_worker_that_cannot_start_is_an_error_of_the_start(
    folder: Path, oracle: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aserve.runner.ranks.build.WORKER", "aserve.no_such_module")
    with pytest.raises(ConfigError, match="rank 1 has ended with status 1"):
        build_ranks(settings(folder), ModelFiles(folder, "safetensors", "tiny"), {2})


def test_there_is_one_engine_with_ranks_at_a_time(folder: Path, llm: LLM) -> None:
    """And the one that is there works on."""
    group = RankGroup(ContextShard(0, 2), torch.device("cpu"))
    with pytest.raises(ConfigError, match="there can be only one"):
        group.join(folder / "store")
    group.close()
    assert llm.generate([[5, 6, 7]], GREEDY)[0].error is None


def test_a_rank_that_is_killed_fails_all_requests_at_once(llm: LLM) -> None:
    """Last, since the engine of this file does not survive it."""
    runner: Any = llm._engine._loaded().runner
    (process,) = runner._others._processes
    with ThreadPoolExecutor(1) as pool:
        params = SamplingParams(temperature=0.0, max_tokens=50)
        running = pool.submit(llm.generate, [prompt_of(9, salt) for salt in range(8)], params)
        num_steps = llm._engine.stats().num_steps
        while llm._engine.stats().num_steps < num_steps + 5:
            time.sleep(0.001)
        os.kill(process._process.pid, signal.SIGKILL)
        outputs = running.result(timeout=30)
    assert {output.error for output in outputs} == {"the engine has failed: rank 1 has ended with status -9"}
    assert (llm._engine.is_alive, llm._engine.is_ready) == (False, False)

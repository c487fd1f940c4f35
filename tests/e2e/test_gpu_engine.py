"""Whole engines on a GPU: transformers' tokens in float32 whatever happens to the batch, and the CPU's page tables.

The references are committed and were made on a CPU (tests/reference), so nothing of this GPU is in them.
"""

import asyncio
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from doubles_demo_engine import (
    DEVICE,
    EXACT,
    MakeEngine,
    complete_all,
    in_loop,
    settled_stats,
    tokens_of,
)
from doubles_gpu_replay import DeviceReplay
from reference.margins import check_greedy, clear_tokens, read_reference

from aserve.config import EngineConfig
from aserve.engine.async_engine import AsyncEngine
from aserve.model_files import ModelFiles
from aserve.request import SamplingParams
from aserve.runner.build import build_runner
from aserve.scheduler import draft_planner

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
Reference = list[dict[str, Any]]
NUM_TOKENS = 16  # of each short reference, after prompts of 32
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
CROWDED: dict[str, Any] = EXACT | {  # 64 sequences of 12 pages would need 768
    "max_num_seqs": 64,
    "max_num_batched_tokens": 512,
    "max_model_len": 64,
    "page_size": 4,
    "num_pages": 480,
}


@pytest.fixture(scope="module")
def short() -> Reference:
    prompts = read_reference("short_reference.json")
    assert len(prompts) == 512
    assert {(len(prompt["prompt_token_ids"]), len(prompt["output_token_ids"])) for prompt in prompts} == {(32, 16)}
    return prompts


async def run_until(
    engine: AsyncEngine, prompt: dict[str, Any], *, request_id: str, delay_s: float, num_wanted: int
) -> list[int]:
    """Return the greedy tokens of a request that leaves once it has ``num_wanted``."""
    await asyncio.sleep(delay_s)
    tokens: list[int] = []
    stream = engine.generate(prompt["prompt_token_ids"], GREEDY, request_id=request_id)
    async for output in stream:
        tokens += output.token_ids
        if len(tokens) >= num_wanted:
            break
    await stream.aclose()
    return tokens


async def run_with_aborts(engine: AsyncEngine, reference: Reference, seed: int) -> list[list[int]]:
    """Run all prompts: half of them at once, half at random times; a tenth are aborted midway."""
    rng = random.Random(seed)
    delays_s = [rng.choice((0.0, rng.uniform(0.0, 0.5))) for _ in reference]
    wanted = [NUM_TOKENS] * len(reference)
    aborted = rng.sample(range(len(reference)), len(reference) // 10)
    for place in aborted:
        wanted[place] = rng.randint(1, NUM_TOKENS - 4)
    outputs = await asyncio.gather(
        *(
            run_until(engine, prompt, request_id=str(place), delay_s=delays_s[place], num_wanted=wanted[place])
            for place, prompt in enumerate(reference)
        )
    )
    assert all(len(output) >= num_wanted for output, num_wanted in zip(outputs, wanted, strict=True))
    assert len(aborted) / 2 < engine.stats().num_aborts <= len(aborted)  # the others ended before they could be
    return list(outputs)


@pytest.mark.parametrize(
    ("settings", "num_requests"),
    [({}, 512), ({"overlap": False}, 512), ({"cuda_graphs": False}, 128), ({"speculation": "ngram"}, 512)],
    ids=["overlap", "no-overlap", "no-graphs", "drafts"],
)
@in_loop
async def test_short_requests_with_aborts_and_preemption(
    make_engine: MakeEngine,
    short: Reference,
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, Any],
    num_requests: int,
) -> None:
    # Hardly any of these texts repeats: what is proposed would not pay, but must not change a token.
    monkeypatch.setattr(draft_planner, "pays_for_row", lambda draft: bool(draft.token_ids))
    monkeypatch.setattr(draft_planner, "pays_for_step", lambda drafts, num_rows: True)
    async with make_engine(**CROWDED, **settings) as engine:
        outputs = await run_with_aborts(engine, short[:num_requests], seed=num_requests)
        stats = await settled_stats(engine)
        check_full_precision()
    check_greedy(short[:num_requests], outputs)
    assert stats.num_preemptions > 0
    assert stats.num_prefix_tokens_hit > 0
    assert bool(stats.num_accepted_tokens) == ("speculation" in settings)


def check_full_precision() -> None:
    """Nothing has switched the matrix units to TF32, whose products err by some 3e-4."""
    assert torch.get_float32_matmul_precision() == "highest"
    assert torch.backends.cuda.matmul.fp32_precision not in ("tf32", "bf16")
    a, b = torch.randn(2, 512, 512, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    product = (a.to(DEVICE, torch.float32) @ b.to(DEVICE, torch.float32)).double().cpu()
    assert (product - a @ b).norm() < 1e-5 * (a @ b).norm()


@pytest.mark.parametrize(
    "settings",
    [{}, {"max_num_batched_tokens": 64}, {"page_size": 1}, {"prefix_cache": False}, {"speculation": "ngram"}],
    ids=lambda settings: ",".join(f"{name}={value}" for name, value in settings.items()) or "base",
)
@in_loop
async def test_long_and_short_prompts(make_engine: MakeEngine, settings: dict[str, Any]) -> None:
    reference = read_reference("greedy_reference.json")
    longest = max(len(prompt["prompt_token_ids"]) for prompt in reference) + 64
    base: dict[str, Any] = EXACT | {
        "max_num_seqs": 32, "max_num_batched_tokens": 256, "page_size": 16, "max_model_len": longest,
    }  # fmt: skip
    base |= settings
    pages = {"num_pages": 32 * (longest // base["page_size"] + 1)}
    params = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
    async with make_engine(**base, **pages) as engine:
        outputs = await complete_all(engine, [prompt["prompt_token_ids"] for prompt in reference], params)
        stats = await settled_stats(engine)
    check_greedy(reference, tokens_of(outputs))
    assert bool(stats.num_prefix_tokens_hit) == base.get("prefix_cache", True), "the prompts share beginnings"


SAMPLED = [
    SamplingParams(max_tokens=24, ignore_eos=True),
    SamplingParams(max_tokens=24, ignore_eos=True, temperature=0.7, top_k=40, top_p=0.9),
    SamplingParams(max_tokens=24, ignore_eos=True, min_p=0.02, repetition_penalty=1.2, frequency_penalty=0.3),
]


@in_loop
async def test_seeded_tokens_are_the_same_in_any_company(make_engine: MakeEngine, short: Reference) -> None:
    """One of them may differ: rounding depends on the batch, and a draw may lie at the border of two tokens."""
    prompts = [prompt["prompt_token_ids"] for prompt in short[:24]]
    params = [replace(SAMPLED[place % 3], seed=place) for place in range(len(prompts))]
    results = []
    for overlap in (True, False):
        async with make_engine(**CROWDED, overlap=overlap) as engine:
            results.append(tokens_of(await complete_all(engine, prompts, params)))
            if overlap:
                alone = [await engine.complete(*pair) for pair in zip(prompts, params, strict=True)]
                results.append(tokens_of(alone))
    together, *others = results
    assert len({tuple(tokens) for tokens in together}) == len(prompts)
    for other in others:
        assert sum(one == another for one, another in zip(together, other, strict=True)) >= len(prompts) - 1


@in_loop
async def test_a_run_recorded_on_a_cpu_replays_with_the_same_pages(
    make_engine: MakeEngine, demo_files: ModelFiles, short: Reference, tmp_path: Path
) -> None:
    """The very plans of the CPU, launched one after the other: the page table on the device follows step by step."""
    reference = short[:96]
    settings = CROWDED | {"max_num_seqs": 24, "num_pages": 160}
    async with make_engine(**settings, device="cpu", trace_steps=100_000) as engine:
        await run_with_aborts(engine, reference, seed=3)
        stats = await settled_stats(engine)
        trace = engine.dump_trace(tmp_path / "run.jsonl")
    assert stats.num_preemptions > 0
    assert stats.num_prefix_tokens_hit > 0
    config = EngineConfig(device=DEVICE, quantization="none", **settings)
    runner = build_runner(config, demo_files, frozenset())
    runner.warm_up()
    replay = DeviceReplay(runner)
    report = replay.run(trace.read_bytes().splitlines())
    assert report.is_equal, str(report)
    assert report.num_aborts > 0
    assert replay.check_tables() == report.num_steps > 16
    tokens = replay.sampled_tokens()
    runner.close()
    num_compared = 0
    for (request_id, index), token in tokens:
        clear = clear_tokens(reference[int(request_id)])
        if index < len(clear):
            assert token == clear[index], (request_id, index)
            num_compared += 1
    assert num_compared >= 0.9 * len(tokens)


@in_loop
async def test_the_metrics_page_shows_no_late_compilation(make_engine: MakeEngine, short: Reference) -> None:
    """After requests of every kind, with the settings that are the default but for their sizes."""
    kinds = [
        GREEDY,
        *SAMPLED,
        SamplingParams(max_tokens=8, logprobs=5, prompt_logprobs=2),
        SamplingParams(max_tokens=8, logit_bias={5: 2.0}, presence_penalty=0.5, min_tokens=4),
    ]
    long = [token for prompt in short[:30] for token in prompt["prompt_token_ids"]]
    prompts = [*(prompt["prompt_token_ids"] for prompt in short[:60]), long, long[:700], long[:3]]
    params = [kinds[place % len(kinds)] for place in range(len(prompts))]
    sizes = {"max_num_seqs": 48, "max_num_batched_tokens": 256, "max_model_len": 1024, "num_pages": 1200}
    async with make_engine(**sizes) as engine:
        for _ in range(2):  # the second time with prefix hits
            await complete_all(engine, prompts, params)
        await run_until(engine, short[0], request_id="left", delay_s=0.0, num_wanted=1)
        await settled_stats(engine)
        page = engine.metrics.render().decode()
    assert metric(page, "late_compilations_total") == 0
    assert metric(page, "prefix_cache_hits_total") > 0
    assert metric(page, "request_success_total") >= 2 * len(prompts)


def metric(page: str, name: str) -> float:
    """Return the sum over all labels."""
    values = re.findall(rf"^aserve_{name}{{[^}}]*}} (\S+)$", page, re.MULTILINE)
    assert values, f"{name} is not on the page"
    return sum(map(float, values))

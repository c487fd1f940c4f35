"""The demo model over several GPUs, joined by NCCL: transformers' tokens, graphs with collectives in them, the end."""

import asyncio
import os
import signal
from typing import Any

import pytest
import torch
from doubles_demo_engine import EXACT, MakeEngine, complete_all, in_loop, settled_stats, tokens_of
from doubles_engine import until
from reference.margins import check_greedy, read_reference

from aserve.attention.registry import BACKENDS
from aserve.errors import EngineDeadError
from aserve.request import SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600), pytest.mark.xdist_group("ranks")]
SIZES = [size for size in (2, 4, 8) if size <= torch.cuda.device_count()]
GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
HERE = [
    backend
    for backend in ("auto", "fi", "fa,fi", "fi,cake", "fa,cake")
    if backend == "auto" or not any(BACKENDS.refusals()[name] for name in backend.split(","))
]
CROWDED: dict[str, Any] = {  # 64 sequences of 6 groups would need 384
    "max_num_seqs": 64,
    "max_num_batched_tokens": 512,
    "max_model_len": 64,
    "page_size": 4,
    "num_pages": 200,
}


@pytest.mark.parametrize("cuda_graphs", [True, False])
@pytest.mark.parametrize("size", SIZES)
@in_loop
async def test_short_requests_under_preemption(make_engine: MakeEngine, size: int, cuda_graphs: bool) -> None:
    reference = read_reference("short_reference.json")[:256]
    settings = EXACT | CROWDED | {"cuda_graphs": cuda_graphs, "decode_context_parallel_size": size}
    async with make_engine(**settings) as engine:
        outputs = await complete_all(engine, [prompt["prompt_token_ids"] for prompt in reference], GREEDY)
        stats = await settled_stats(engine)
    check_greedy(reference, tokens_of(outputs))
    assert bool(stats.num_preemptions) == (size == 2), "with larger groups the pages last for all"


@pytest.mark.parametrize("backend", HERE)
@pytest.mark.parametrize("size", SIZES[:1])
@in_loop
async def test_backends_in_bfloat16(make_engine: MakeEngine, size: int, backend: str) -> None:
    """Ranks stay together over long and short prompts and every kind of sampling; else the engine would be gone."""
    reference = read_reference("greedy_reference.json")
    prompts = [prompt["prompt_token_ids"] for prompt in reference]
    params = [
        SamplingParams(temperature=0.3 * (place % 3), top_p=0.9 if place % 2 else 1.0, seed=place, max_tokens=48)
        for place in range(len(prompts))
    ]
    async with make_engine(attention_backend=backend, decode_context_parallel_size=size) as engine:
        outputs = await complete_all(engine, prompts, params)
        assert engine.failure is None
    assert all(output.token_ids for output in outputs)


@pytest.mark.parametrize("size", SIZES[:1])
@in_loop
async def test_a_killed_rank_fails_all_requests_at_once(make_engine: MakeEngine, size: int) -> None:
    async with make_engine(**EXACT, **CROWDED, decode_context_parallel_size=size) as engine:
        runner: Any = engine._loaded().runner
        running = [asyncio.create_task(engine.complete([5, 6, 7], SamplingParams(max_tokens=60))) for _ in range(8)]
        await until(lambda: engine.stats().num_steps > 5)
        os.kill(runner._others._processes[0]._process.pid, signal.SIGKILL)
        for one in await asyncio.wait_for(asyncio.gather(*running, return_exceptions=True), timeout=10):
            assert isinstance(one, EngineDeadError)
        assert not engine.is_alive

"""The runner on a GPU: the CPU's tokens, graphs that equal eager steps, and a host that never waits for the device."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from doubles_models import make_oracle
from doubles_runner import RandomDriver, Run
from reference.margins import count_clear

from aserve.attention.cake_backend import CakeBackend
from aserve.config import EngineConfig
from aserve.model_files import ModelFiles
from aserve.request import SamplingParams, TokenLogprobs
from aserve.runner.base import ModelRunner
from aserve.runner.build import build_runner
from aserve.runner.cuda.cuda_runner import CudaRunner
from aserve.scheduler.plan import RowStart, StepPlan

pytestmark = pytest.mark.gpu
GREEDY = SamplingParams(temperature=0.0)
PARAMS = [
    SamplingParams(temperature=0.0, logprobs=2),
    SamplingParams(temperature=0.8),
    SamplingParams(temperature=1.2, top_k=20, repetition_penalty=1.3, min_tokens=4),
    SamplingParams(top_p=0.8, min_p=0.01, frequency_penalty=1.0, logit_bias={5: 3.0}, prompt_logprobs=1),
]
FORBIDDEN_CALLS = ("cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaMalloc", "cudaHostAlloc", "cudaFree")
SPIN_CYCLES = 100_000_000  # some 50 ms
NUM_OUTPUTS = 12
CLEAR_MARGIN = 0.4  # between float32's two best logits; transformers in bfloat16 errs by 0.2 at most, 0.07 in the mean


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tiny")


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Any:
    """A tiny Qwen3 of transformers with the head size that FlashInfer's prebuilt operators have."""
    shape = {"num_hidden_layers": 2, "hidden_size": 256, "head_dim": 128, "num_attention_heads": 8}
    return make_oracle("qwen3", shape | {"num_key_value_heads": 2, "max_position_embeddings": 512}, folder)


@pytest.fixture(scope="module")
def files(folder: Path, oracle: Any) -> ModelFiles:
    """The oracle's checkpoint."""
    return ModelFiles(folder, "safetensors", "tiny")


def make(files: ModelFiles, **settings: object) -> ModelRunner:
    defaults = {"device": "cuda", "max_num_seqs": 24, "max_num_batched_tokens": 160, "num_pages": 300}
    runner = build_runner(EngineConfig(**defaults | settings), files, frozenset({2}))  # type: ignore[arg-type]
    runner.warm_up()
    return runner


def prompts_of(num_runs: int) -> list[list[int]]:
    return [[3 + i, 7, 2 * i, *range(i, i + 40)] for i in range(num_runs)]


def drive(
    runner: ModelRunner, params: list[SamplingParams], num_runs: int = 24, drafts: Sequence[list[int]] = ()
) -> list[list[int]]:
    """Return what each run got; ``drafts`` are outputs to make drafts of, right ones and wrong ones."""
    runs = [Run(prompt, NUM_OUTPUTS, params[i % len(params)], i) for i, prompt in enumerate(prompts_of(num_runs))]
    for run, outputs in zip(runs, drafts, strict=False):
        run.expected = outputs
    driver = RandomDriver(runner, runs, 5)
    driver.run()
    assert driver.num_preemptions
    assert driver.num_mixed_steps
    assert not drafts or min(driver.num_accepted[count] for count in range(3)) > 0, driver.num_accepted
    return [run.outputs for run in runs]


def count_same(some: list[list[int]], others: list[list[int]]) -> int:
    return sum(a == b for a, b in zip(some, others, strict=True))


@pytest.fixture(scope="module")
def expected(files: ModelFiles) -> list[list[int]]:
    runner = make(files, device="cpu", dtype="float32")
    outputs = drive(runner, PARAMS)
    runner.close()
    return outputs


@pytest.mark.parametrize("cuda_graphs", [True, False])
def test_random_schedules_equal_the_cpu(files: ModelFiles, expected: list[list[int]], cuda_graphs: bool) -> None:
    runner = make(files, dtype="float32", attention_backend="torch", cuda_graphs=cuda_graphs)
    assert isinstance(runner, CudaRunner)
    outputs = drive(runner, PARAMS)
    runner.close()
    assert (
        count_same(outputs, expected) >= len(expected) - 1
    )  # a draw may fall on the other side of a border by rounding


def make_for_drafts(files: ModelFiles, **settings: object) -> ModelRunner:
    runner = make(files, **settings, speculation="ngram")
    assert runner.limits.max_num_drafts == 24 * EngineConfig().num_speculative_tokens
    return runner


@pytest.mark.parametrize("cuda_graphs", [True, False])
def test_tokens_with_drafts_are_those_without(files: ModelFiles, cuda_graphs: bool) -> None:
    """Greedy rows and draws, in float32, whose rounding is far below what decides between two tokens."""
    params = [GREEDY, SamplingParams(temperature=0.8), SamplingParams(top_k=20, logprobs=1)]
    settings = {"dtype": "float32", "attention_backend": "torch", "cuda_graphs": cuda_graphs}
    plain = make(files, **settings)
    expected = drive(plain, params)
    plain.close()
    runner = make_for_drafts(files, **settings)
    outputs = drive(runner, params, drafts=expected)
    runner.close()
    assert outputs == expected


@pytest.fixture(scope="module")
def continuations(oracle: Any) -> list[list[int]]:
    """What transformers says after the prompts, greedily."""
    texts = torch.tensor(prompts_of(24))
    with torch.inference_mode():
        for _ in range(NUM_OUTPUTS):
            texts = torch.cat([texts, oracle(texts).logits[:, -1:].argmax(-1)], dim=1)
    return texts[:, -NUM_OUTPUTS:].tolist()


@pytest.mark.parametrize(
    ("backend", "cuda_graphs"), [("fi", True), ("fi", False), ("fi,cake", True), ("cake", True), ("cake", False)]
)
def test_clear_tokens_with_drafts_in_bfloat16(
    files: ModelFiles, oracle: Any, continuations: list[list[int]], backend: str, cuda_graphs: bool
) -> None:
    """Greedy rows alone: draws invert sums of probabilities, which bfloat16 moves by enough for some to differ."""
    runner = make_for_drafts(files, dtype="bfloat16", attention_backend=backend, cuda_graphs=cuda_graphs)
    if backend == "cake":
        assert isinstance(runner, CudaRunner)
        served = runner._body._parts.backend
        assert isinstance(served, CakeBackend)
        assert served._chunks is not None
        assert served._chunks._drafts is not None, "drafts are not left to the kernel for prompts"
        assert {served._chunks._drafts.max_query_len(kind) for kind in served.problem.kinds} == {6}
    outputs = drive(runner, [GREEDY], drafts=continuations)
    assert runner.num_late_compilations == 0 or not cuda_graphs
    runner.close()
    pairs = zip(prompts_of(24), outputs, strict=True)
    num_clear = sum(count_clear(oracle, prompt, output, min_margin=CLEAR_MARGIN) for prompt, output in pairs)
    assert num_clear > 0.6 * 24 * NUM_OUTPUTS


def decodes(prompts: list[list[int]], params: SamplingParams) -> Iterator[StepPlan]:
    """A prefill of all prompts, then four decodes of all of them, on pages of 16 tokens."""
    rows = list(range(len(prompts)))
    lens = [len(prompt) for prompt in prompts]
    yield StepPlan(
        0, rows, [0] * len(rows), lens, [True] * len(rows), 0,
        [RowStart(row, prompt, len(prompt), 0, params) for row, prompt in enumerate(prompts)],
        [(row, index, row * 3 + index) for row in rows for index in range(3)],
    )  # fmt: skip
    for step in range(4):
        yield StepPlan(step + 1, rows, [count + step for count in lens], [1] * len(rows), [True] * len(rows), len(rows))


def run_all(runner: ModelRunner, plans: Iterator[StepPlan]) -> list[list[TokenLogprobs | None]]:
    futures = [runner.launch(plan) for plan in plans]
    return [future.result(60).logprobs or [] for future in futures]


@pytest.mark.parametrize("backend", ["torch", "fi", "cake"])
def test_graphs_equal_eager_steps_for_every_batch_size(files: ModelFiles, backend: str) -> None:
    """After a larger batch has left every buffer dirty; log probabilities, since close tokens may swap."""
    dtype = "float32" if backend == "torch" else "bfloat16"
    captured, eager = (
        make(files, dtype=dtype, attention_backend=backend, cuda_graphs=enabled) for enabled in (True, False)
    )
    params = SamplingParams(temperature=0.0, logprobs=1)
    dirt = [[90 - i] * 6 for i in range(24)]
    tolerance = 1e-4 if backend == "torch" else 3e-2
    num_swaps = 0 if backend == "torch" else 1  # in a batch too small for a share to allow any
    for count in range(1, 25):
        prompts = [[5 + i, count, *range(1, 3 + i % 5)] for i in range(count)]
        run_all(captured, decodes(dirt, params))
        results = [run_all(runner, decodes(prompts, params)) for runner in (captured, eager)]
        same = set(range(count))  # sequences that chose the same tokens so far
        for ours, theirs in zip(*results, strict=True):
            assert len(ours) == len(theirs) == count
            for place in sorted(same):
                a, b = ours[place], theirs[place]
                assert a is not None
                assert b is not None
                assert a.logprob == pytest.approx(b.logprob, abs=tolerance)
                if a.token_id != b.token_id:
                    same.remove(place)
        assert count - len(same) <= max(count * 0.3, num_swaps)
    captured.close()
    eager.close()


@pytest.mark.parametrize(("backend", "dtype"), [("torch", "float32"), ("fi", "bfloat16"), ("cake", "bfloat16")])
def test_a_slow_device_gives_the_same_tokens(
    files: ModelFiles, monkeypatch: pytest.MonkeyPatch, backend: str, dtype: str
) -> None:
    """A spinning kernel before each step: every buffer is still unread when the host wants to fill it again."""
    runner = make(files, dtype=dtype, attention_backend=backend)
    assert isinstance(runner, CudaRunner)
    swift = drive(runner, PARAMS)
    enqueue = runner._enqueue

    def spin_then_enqueue(plan: StepPlan) -> object:
        torch.cuda._sleep(SPIN_CYCLES)
        return enqueue(plan)

    monkeypatch.setattr(runner, "_enqueue", spin_then_enqueue)
    assert drive(runner, PARAMS) == swift
    runner.close()


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")
@pytest.mark.parametrize("backend", ["fi", "cake"])
def test_steady_steps_neither_wait_nor_allocate(files: ModelFiles, backend: str) -> None:
    """A hundred decode steps under the profiler, with torch's own alarm for hidden waits on."""
    runner = make(files, attention_backend=backend)
    prompts = [[5 + i, 9, *range(1, 3 + i % 5)] for i in range(24)]
    prefill, *_ = decodes(prompts, GREEDY)
    runner.launch(prefill).result(60)
    lens = [len(prompt) for prompt in prompts]
    rows = list(range(24))

    def plans(first: int, count: int) -> Iterator[StepPlan]:
        for step in range(first, first + count):
            yield StepPlan(step, rows, [n + step % 30 for n in lens], [1] * 24, [True] * 24, 24)

    for plan in plans(0, 10):
        runner.launch(plan).result(60)
    steady = plans(10, 101)
    try:
        torch.cuda.set_sync_debug_mode("error")
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profile:
            flight = runner.launch(next(steady))  # the first event of a kind may still set something up
            with torch.profiler.record_function("steady"):
                for plan in steady:
                    launched = runner.launch(plan)
                    flight.result(60)
                    flight = launched
            flight.result(60)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    events = list(profile.events() or ())
    host = torch.autograd.DeviceType.CPU  # the span stands in the device's timeline, too
    (span,) = [event.time_range for event in events if event.name == "steady" and event.device_type == host]
    names = {event.name for event in events if span.start <= event.time_range.start <= span.end}
    assert any("cudaGraphLaunch" in name for name in names), sorted(names)
    assert not [name for name in names if name in FORBIDDEN_CALLS]
    assert not [name for name in names if "Pageable" in name]
    assert runner.num_late_compilations == 0
    runner.close()


@pytest.mark.parametrize("backend", ["fi", "fi,cake", "cake"])
def test_nothing_compiles_after_the_start(files: ModelFiles, backend: str) -> None:
    runner = make(files, attention_backend=backend)
    drive(runner, PARAMS)
    assert runner.num_late_compilations == 0
    runner.close()


def test_a_closed_runner_refuses_and_closing_twice_is_harmless(files: ModelFiles) -> None:
    runner = make(files, dtype="float32", attention_backend="torch")
    runner.close()
    runner.close()
    with pytest.raises(Exception, match="closed"):
        runner.launch(StepPlan(0))

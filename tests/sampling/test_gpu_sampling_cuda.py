"""Sampling at the true size of a vocabulary: captured and replayed, without a wait, without compiling, and how fast."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from doubles_sampling import Case, assert_inverts_cdf, filters
from torch import Tensor

from aserve.kernels.gpu.compile_count import CompileCounter
from aserve.request import SamplingParams
from aserve.sampling.draw import FilterValues, find_limit
from aserve.sampling.gpu.token_picker import PoolTarget, TokenPicker
from aserve.sampling.sampler import Sampler
from aserve.scheduler.plan import RowStart

pytestmark = pytest.mark.gpu
VOCAB = 151_936
CASES: list[Case] = [(0, 1.0, 0.0), (50, 1.0, 0.0), (0, 0.9, 0.0), (20, 0.95, 0.05), (0, 1.0, 0.1), (20_000, 0.99, 0.0)]


def make_rows(num_rows: int, seed: int, spread: float = 3.0) -> tuple[Tensor, Tensor, Tensor]:
    """Return logits, uniforms and temperatures on the GPU; every fourth row is greedy."""
    generator = torch.Generator("cuda").manual_seed(seed)
    logits = torch.randn(num_rows, VOCAB, generator=generator, device="cuda") * spread
    uniforms = torch.rand(num_rows, dtype=torch.float64, generator=generator, device="cuda")
    temperatures = torch.rand(num_rows, generator=generator, device="cuda") + 0.3
    temperatures[3::4] = 0.0
    return logits, uniforms, temperatures


def make_filters(num_rows: int) -> FilterValues:
    columns = zip(*(CASES[i % len(CASES)] for i in range(num_rows)), strict=True)
    return FilterValues(*(torch.tensor(column, dtype=torch.float32, device="cuda") for column in columns))


@pytest.mark.parametrize("num_rows", [1, 7, 64, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_pick_inverts_the_cumulative_distribution(num_rows: int, dtype: torch.dtype) -> None:
    logits, uniforms, temperatures = make_rows(num_rows, num_rows)
    logits = logits.to(dtype)
    token_ids = torch.empty(num_rows, dtype=torch.int32, device="cuda")
    TokenPicker(256, VOCAB, logits.device).pick_plain(logits, uniforms, temperatures, token_ids)
    assert_inverts_cdf(token_ids, logits.float(), uniforms, temperatures)


@pytest.mark.parametrize("spread", [0.05, 1.0, 4.0])
def test_limits_are_those_of_a_sort(spread: float) -> None:
    """But for the neighbours of a nucleus' border, which may round either way: there a token's weight decides."""
    logits, _, temperatures = make_rows(36, 1, spread)
    temperatures.clamp_(min=0.5)
    limits = TokenPicker(36, VOCAB, logits.device).find_limits(logits, temperatures, make_filters(36)).cpu()
    scaled = ((logits - logits.amax(-1, keepdim=True)) / temperatures.unsqueeze(1)).cpu()
    expected = find_limit(scaled, filters(*map(list, zip(*(CASES * 6), strict=True))))  # type: ignore[arg-type]
    for i in range(36):
        top_k, top_p, _ = CASES[i % len(CASES)]
        if top_p == 1:
            assert limits[i] == pytest.approx(float(expected[i]), abs=1e-6)
            continue
        weights = scaled[i].double().exp()
        low, high = sorted((float(limits[i]), float(expected[i])))
        assert weights[(scaled[i] >= low) & (scaled[i] < high)].sum() <= 2e-6 * weights.sum(), (top_k, top_p)


@pytest.mark.parametrize("is_filtered", [False, True])
def test_a_captured_pick_follows_its_inputs(is_filtered: bool) -> None:
    """Replays after other contents, other places in the pool and a row that is not finite."""
    num_rows, picker = 16, TokenPicker(16, VOCAB, torch.device("cuda"))
    logits, uniforms, temperatures = make_rows(num_rows, 0)
    pool = torch.full((num_rows + 1, 50), -5, dtype=torch.int32, device="cuda")
    rows, positions = (torch.zeros(num_rows, dtype=torch.int32, device="cuda") for _ in range(2))
    token_ids = torch.empty(num_rows, dtype=torch.int32, device="cuda")
    target = PoolTarget(pool, rows, positions)

    def pick(ids: Tensor, to: PoolTarget | None = None) -> None:
        if is_filtered:
            picker.pick_filtered(logits, uniforms, temperatures, make_filters_once, ids, to)
        else:
            picker.pick_plain(logits, uniforms, temperatures, ids, to)

    make_filters_once = make_filters(num_rows)
    pick(token_ids, target)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        pick(token_ids, target)
    for step in range(5):
        for held, new in zip((logits, uniforms, temperatures), make_rows(num_rows, 10 + step), strict=True):
            held.copy_(new)
        logits[step, 77_777] = torch.nan
        rows.copy_(torch.randperm(num_rows, device="cuda"))
        positions.fill_(step)
        graph.replay()
        eager = torch.empty_like(token_ids)
        pick(eager)
        assert torch.equal(token_ids, eager)
        assert token_ids[step] == -1
        assert torch.equal(pool[rows.long(), step], token_ids.clamp(min=0))
    assert (pool[num_rows] == -5).all()


def test_the_sampler_neither_waits_nor_compiles() -> None:
    """All parameters at once, under the mode in which torch raises at a synchronisation; uploads are pinned."""

    def upload(array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.array(array)).pin_memory().to("cuda", non_blocking=True)

    device = torch.device("cuda")
    sampler = Sampler(9, VOCAB, {2}, device, upload)
    assert sampler.reserve() == 9 * VOCAB * 5
    all_params = [
        SamplingParams(),
        SamplingParams(temperature=0.0, logprobs=5),
        SamplingParams(top_k=40, top_p=0.9, min_p=0.01),
        SamplingParams(presence_penalty=1.0, frequency_penalty=0.5, repetition_penalty=1.3),
        SamplingParams(logit_bias={3: 5.0, 4: -100.0}, min_tokens=99, stop_token_ids=(8, 9)),
    ]
    logits = torch.randn(5, VOCAB, device="cuda")
    sampler.warm_up(logits)
    compilations = CompileCounter()
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        for row, params in enumerate(all_params):
            sampler.start_row(RowStart(row, [5, 9, 3, 7], 3, row, params))
        for step in range(3):
            sampler.sample(logits.clone(), np.arange(5), np.full(5, 4 + step))
    finally:
        torch.cuda.set_sync_debug_mode("default")
        compilations.close()
    assert compilations.compilations() == 0


def time_us(work: Callable[[], object]) -> float:
    """Return the time of one replay of ``work``, the best of five times twenty."""
    work()
    torch.cuda.synchronize()
    graph, best = torch.cuda.CUDAGraph(), float("inf")
    with torch.cuda.graph(graph):
        for _ in range(20):
            work()
    for _ in range(5):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        best = min(best, start.elapsed_time(end) * 50)
    return best


@pytest.mark.alone
@pytest.mark.parametrize("num_rows", [1, 64, 256])
def test_picks_take_little_more_than_reading_the_logits(num_rows: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Against torch's argmax over the same logits, in the same run; filters read them five to eight times."""
    picker = TokenPicker(num_rows, VOCAB, torch.device("cuda"))
    token_ids = torch.empty(num_rows, dtype=torch.int32, device="cuda")
    chosen = make_filters(num_rows)
    for spread in (0.1, 3.0):
        logits, uniforms, temperatures = make_rows(num_rows, 2, spread)
        argmax = time_us(lambda x=logits: x.argmax(-1))  # type: ignore[misc]
        plain = time_us(lambda x=(logits, uniforms, temperatures): picker.pick_plain(*x, token_ids))  # type: ignore[misc]
        filtered = time_us(
            lambda x=(logits, uniforms, temperatures): picker.pick_filtered(*x, chosen, token_ids)  # type: ignore[misc]
        )
        with capsys.disabled():
            print(
                f"\n{num_rows} rows, spread {spread}: argmax {argmax:.0f} us, plain {plain:.0f} us, "
                f"with filters {filtered:.0f} us"
            )
        assert plain < 2 * argmax + 10
        assert filtered < 1500

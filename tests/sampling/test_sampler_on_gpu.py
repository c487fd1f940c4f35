"""The sampler with the kernels of a GPU against the sampler without; and the rows that a graph may sample."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from aserve.request import SamplingParams
from aserve.sampling.gpu.token_picker import TokenPicker
from aserve.sampling.sampler import Sampler
from aserve.scheduler.plan import RowStart, StepTokens

pytestmark = pytest.mark.filterwarnings("ignore:(.* encountered in|All-NaN slice):RuntimeWarning")  # of numpy
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CPU = torch.device("cpu")
VOCAB, EOS = 2100, 2
PARAMS = [
    SamplingParams(),
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.3, top_k=7),
    SamplingParams(top_p=0.5, logprobs=3),
    SamplingParams(min_p=0.1, presence_penalty=1.0, frequency_penalty=0.5, repetition_penalty=1.3),
    SamplingParams(logit_bias={3: 100.0, 4: -100.0}, min_tokens=5),
    SamplingParams(top_k=1, top_p=0.1),
    SamplingParams(temperature=1.7),
]
PLAIN = [0, 1, 6, 7]


def make(device: torch.device, picker: TokenPicker | None = None) -> Sampler:
    return Sampler(20, VOCAB, {EOS}, device, lambda array: torch.from_numpy(array.copy()).to(device), picker)


def start_all(sampler: Sampler, all_params: list[SamplingParams] = PARAMS) -> None:
    for row, params in enumerate(all_params):
        sampler.start_row(RowStart(row, [5, 9, 9, 700, 3], 4, 100 + row, params))


def sample(sampler: Sampler, logits: Tensor, rows: list[int], position: int) -> StepTokens:
    device = DEVICE if sampler._picker else CPU
    sampled = sampler.sample(logits.to(device, copy=True), np.array(rows), np.full(len(rows), position))
    return sampled.report(0, [tensor.cpu() for tensor in sampled.tensors()])


def random_logits(count: int, seed: int) -> Tensor:
    return torch.randn(count, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2


def test_every_row_gets_the_token_it_gets_without_kernels() -> None:
    """Beside rows that are not finite, whose errors are the same."""
    on_gpu, plain = make(DEVICE, TokenPicker(20, VOCAB, DEVICE)), make(CPU)
    for sampler in (on_gpu, plain):
        start_all(sampler)
    for step in range(6):
        logits = random_logits(len(PARAMS), step)
        if step % 3 == 2:
            logits[step % len(PARAMS), 2000] = math.nan
        rows = np.random.default_rng(step).permutation(len(PARAMS)).tolist()
        got, expected = (sample(sampler, logits, rows, 5 + step) for sampler in (on_gpu, plain))
        assert got.token_ids == expected.token_ids
        assert got.errors == expected.errors
        assert got.logprobs is not None
        assert expected.logprobs is not None
        for one, other in zip(got.logprobs, expected.logprobs, strict=True):
            assert (one is None) == (other is None)
            if one and other:
                assert one.token_id == other.token_id
                assert one.logprob == pytest.approx(other.logprob, abs=1e-5)


@pytest.mark.parametrize("is_filtered", [False, True])
def test_a_step_of_rows_without_or_with_filters(is_filtered: bool) -> None:
    on_gpu, plain = make(DEVICE, TokenPicker(20, VOCAB, DEVICE)), make(CPU)
    for sampler in (on_gpu, plain):
        start_all(sampler)
    rows = [2, 3] if is_filtered else PLAIN
    for step in range(6):
        logits = random_logits(len(rows), step)
        assert sample(on_gpu, logits, rows, 5 + step).token_ids == sample(plain, logits, rows, 5 + step).token_ids


def test_plain_inputs_are_all_that_plain_rows_need() -> None:
    """A picker that is told nothing else picks what the sampler samples; entries past the rows stay."""
    sampler = make(CPU)
    start_all(sampler)
    rows = np.array([7, 0, 6, 1])
    uniforms, temperatures = np.full(6, -1.0), np.full(6, -1.0, np.float32)
    for step in range(6):
        positions = np.array([5, 9, 6, 30]) + step
        assert sampler.are_plain(rows, positions)
        sampler.plain_inputs(rows, positions, uniforms[:4], temperatures[:4])
        assert temperatures.tolist() == [np.float32(1.7), 1.0, 0.0, 0.0, -1.0, -1.0]
        logits = random_logits(4, step)
        token_ids = torch.empty(4, dtype=torch.int32, device=DEVICE)
        TokenPicker(4, VOCAB, DEVICE).pick_plain(
            logits.to(DEVICE),
            torch.from_numpy(uniforms[:4]).to(DEVICE),
            torch.from_numpy(temperatures[:4]).to(DEVICE),
            token_ids,
        )
        assert sampler.sample(logits, rows, positions).token_ids.tolist() == token_ids.tolist()
    assert uniforms[4:].tolist() == [-1.0, -1.0]


def test_only_rows_that_want_nothing_else_are_plain() -> None:
    sampler = make(CPU)
    start_all(sampler)
    for row in range(len(PARAMS)):
        assert sampler.are_plain(np.array([row])) == (row in PLAIN)
    assert sampler.are_plain(np.array(PLAIN))
    assert not sampler.are_plain(np.array([*PLAIN, 3]))


def test_a_top_k_of_the_whole_vocabulary_is_plain() -> None:
    sampler = make(CPU)
    start_all(sampler, [SamplingParams(top_k=VOCAB), SamplingParams(top_k=VOCAB - 1)])
    assert sampler.are_plain(np.array([0]))
    assert not sampler.are_plain(np.array([1]))


def test_rows_become_plain_once_they_may_end() -> None:
    """The prompt has 4 tokens; a row that nothing can end is plain from the start."""
    sampler = make(CPU)
    start_all(sampler, [SamplingParams(min_tokens=3), SamplingParams(min_tokens=3, ignore_eos=True)])
    assert not sampler.are_plain(np.array([0]))
    assert [sampler.are_plain(np.array([0]), np.array([position])) for position in (4, 6, 7, 90)] == [
        False,
        False,
        True,
        True,
    ]
    assert sampler.are_plain(np.array([1]))


def test_reserved_memory_is_not_allocated_again() -> None:
    sampler = make(CPU)
    assert sampler.reserve() == 20 * VOCAB * 5  # int32 counts and prompt marks
    tables = sampler._counts._tables()
    start_all(sampler)
    sample(sampler, random_logits(len(PARAMS), 0), list(range(len(PARAMS))), 5)
    assert all(one is other for one, other in zip(tables, sampler._counts._tables(), strict=True))
    assert sampler.reserve() == 20 * VOCAB * 5


def test_warming_up_changes_no_row() -> None:
    warm, cold = (make(DEVICE, TokenPicker(20, VOCAB, DEVICE)) for _ in range(2))
    for sampler in (warm, cold):
        start_all(sampler)
    warm.warm_up(random_logits(2, 9).to(DEVICE))
    logits, rows = random_logits(len(PARAMS), 0), list(range(len(PARAMS)))
    assert sample(warm, logits, rows, 5).token_ids == sample(cold, logits, rows, 5).token_ids

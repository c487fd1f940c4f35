"""The sampler as the runner uses it: rows start, logits come, tokens go."""

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import MinNewTokensLengthLogitsProcessor, RepetitionPenaltyLogitsProcessor

from aserve.request import SamplingParams
from aserve.sampling.sampler import Sampler
from aserve.scheduler.plan import RowStart, StepTokens

VOCAB = 1000
EOS = 2
PROMPT = [5, 9, 9, 700]


def make_sampler(num_rows: int = 40, vocab_size: int = VOCAB) -> Sampler:
    return Sampler(num_rows, vocab_size, {EOS}, torch.device("cpu"), lambda array: torch.from_numpy(array.copy()))


def start(
    sampler: Sampler,
    row: int,
    params: SamplingParams,
    *,
    prompt: Sequence[int] = PROMPT,
    outputs: Sequence[int] = (),
    seed: int = 0,
) -> None:
    sampler.start_row(RowStart(row, [*prompt, *outputs], len(prompt), seed, params))


def sample(sampler: Sampler, logits: Tensor, rows: list[int], positions: int | list[int] = 4) -> StepTokens:
    places = [positions] * len(rows) if isinstance(positions, int) else positions
    sampled = sampler.sample(logits.clone(), np.array(rows), np.array(places))
    return sampled.report(0, sampled.tensors())


def random_logits(count: int, seed: int = 0, vocab_size: int = VOCAB) -> Tensor:
    return torch.randn(count, vocab_size, generator=torch.Generator().manual_seed(seed)) * 2


GREEDY = SamplingParams(temperature=0.0)


def test_greedy_takes_the_best_and_the_lowest_id_of_equals() -> None:
    sampler = make_sampler()
    logits = random_logits(3)
    logits[1, [7, 300, 900]] = 50.0
    for row in (4, 0, 9):
        start(sampler, row, GREEDY)
    tokens = sample(sampler, logits, [4, 0, 9])
    assert tokens.token_ids == [int(np.argmax(row)) for row in logits.numpy()]
    assert tokens.token_ids[1] == 7
    assert tokens.logprobs is None
    assert tokens.errors == {}


@pytest.mark.parametrize("params", [{"top_k": 1}, {"top_p": 0.0}, {"temperature": 1e-7}, {"min_p": 1.0}])
def test_limits_that_leave_one_token_are_greedy(params: dict[str, float]) -> None:
    sampler = make_sampler()
    start(sampler, 0, SamplingParams(**params), seed=3)  # type: ignore[arg-type]
    logits = random_logits(1)
    assert sample(sampler, logits, [0]).token_ids == [int(logits.argmax())]


@pytest.mark.parametrize("top_k", [-1, 0, VOCAB, 10**9, 2**31 - 1])
def test_a_top_k_of_the_whole_vocabulary_or_more_is_off(top_k: int) -> None:
    sampler, plain = make_sampler(), make_sampler()
    start(sampler, 0, SamplingParams(top_k=top_k), seed=11)
    start(plain, 0, SamplingParams(), seed=11)
    for position in range(4, 24):
        logits = random_logits(1, position)
        assert sample(sampler, logits, [0], position).token_ids == sample(plain, logits, [0], position).token_ids


NEIGHBOURS = [
    SamplingParams(),
    GREEDY,
    SamplingParams(temperature=0.3, top_k=7),
    SamplingParams(top_p=0.5, logprobs=3),
    SamplingParams(min_p=0.1, presence_penalty=1.0, frequency_penalty=0.5, repetition_penalty=1.3),
    SamplingParams(logit_bias={3: 100.0, 4: -100.0}, min_tokens=5),
]


@pytest.mark.parametrize("num_neighbours", [1, 7, 31])
@pytest.mark.parametrize(
    "params", [SamplingParams(temperature=0.8), SamplingParams(temperature=0.8, top_p=0.9, top_k=40)]
)
def test_a_seeded_row_ignores_its_neighbours_and_its_row(params: SamplingParams, num_neighbours: int) -> None:
    alone, crowded = make_sampler(), make_sampler()
    start(alone, 0, params, seed=42)
    start(crowded, 33, params, seed=42)
    for row in range(num_neighbours):
        start(crowded, row, NEIGHBOURS[row % len(NEIGHBOURS)], seed=1000 + row)
    rows = [*range(num_neighbours), 33]
    texts = [], []
    for position in range(4, 36):
        logits = random_logits(num_neighbours + 1, position)
        texts[0].append(sample(alone, logits[-1:], [0], position).token_ids[0])
        positions = [*range(10, 10 + num_neighbours), position]
        texts[1].append(sample(crowded, logits, rows, positions).token_ids[-1])
    assert texts[0] == texts[1]
    assert len(set(texts[0])) > 5


def test_a_restarted_row_goes_on_as_if_nothing_happened() -> None:
    """Preemption: the outputs come back with the row start, and the next positions draw what they would have drawn."""
    params = SamplingParams(temperature=0.9, frequency_penalty=1.5, repetition_penalty=1.2, min_tokens=3)
    whole, preempted = make_sampler(), make_sampler()
    start(whole, 0, params, seed=5)
    start(preempted, 0, params, seed=5)
    outputs: list[int] = []
    for step in range(20):
        if step == 9:
            start(preempted, 0, GREEDY, prompt=[1] * 50)  # someone else in between
            start(preempted, 7, params, outputs=outputs, seed=5)
        logits = random_logits(1, step)
        position = len(PROMPT) + step
        expected = sample(whole, logits, [0], position).token_ids
        assert sample(preempted, logits, [7 if step >= 9 else 0], position).token_ids == expected
        outputs += expected


@pytest.mark.parametrize("seed", [0, -1, 2**63 - 1, 2**64 - 1, -(2**63)])
def test_any_seed_of_64_bits_draws(seed: int) -> None:
    sampler = make_sampler()
    start(sampler, 0, SamplingParams(), seed=seed)
    drawn = {sample(sampler, random_logits(1), [0], position).token_ids[0] for position in range(20)}
    assert len(drawn) > 5


def adjusted(sampler: Sampler, logits: Tensor, row: int, position: int) -> Tensor:
    """The logits [V] that the choice is made from."""
    values = logits.clone()
    sampled = sampler._adjust(values, np.array([row]), np.array([position]), sampler._params.needs[np.array([row])])
    return sampled[0]


def test_repetition_penalty_is_that_of_transformers() -> None:
    """Over prompt and outputs, positive and negative logits."""
    sampler = make_sampler()
    outputs = [3, 4, 3]
    start(sampler, 1, SamplingParams(temperature=0.0, repetition_penalty=1.7), outputs=outputs)
    logits = random_logits(1)
    expected = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([[*PROMPT, *outputs]]), logits.clone())
    torch.testing.assert_close(adjusted(sampler, logits, 1, 7), expected[0])


def test_penalties_follow_their_formulas() -> None:
    sampler = make_sampler()
    outputs = [3, 4, 3, 3]
    params = SamplingParams(repetition_penalty=1.5, presence_penalty=0.7, frequency_penalty=-0.4)
    start(sampler, 2, params, outputs=outputs)
    logits = random_logits(1)
    expected = logits[0].tolist()
    for token_id in {*PROMPT, *outputs}:
        expected[token_id] = expected[token_id] / 1.5 if expected[token_id] > 0 else expected[token_id] * 1.5
    for token_id in set(outputs):
        expected[token_id] -= 0.7 - 0.4 * outputs.count(token_id)
    assert adjusted(sampler, logits, 2, 8).tolist() == pytest.approx(expected, abs=1e-6)


def test_counts_follow_what_is_sampled() -> None:
    """Nobody tells the sampler its own tokens: a presence penalty makes it walk down the ranking."""
    sampler = make_sampler()
    start(sampler, 0, SamplingParams(temperature=0.0, presence_penalty=2.0))
    start(sampler, 1, GREEDY)
    logits = torch.zeros(2, VOCAB)
    logits[:, 10], logits[:, 20], logits[:, 30] = 3.0, 2.5, 1.5
    ids = [sample(sampler, logits, [1, 0], 4 + step).token_ids for step in range(3)]
    assert ids == [[10, 10], [10, 20], [10, 30]]


def test_logit_bias_is_added() -> None:
    sampler = make_sampler()
    start(sampler, 3, SamplingParams(temperature=0.0, logit_bias={0: 1.5, 999: -100.0, 17: 2.25}))
    logits = random_logits(1)
    expected = logits[0].clone()
    expected[0] += 1.5
    expected[999] -= 100.0
    expected[17] += 2.25
    torch.testing.assert_close(adjusted(sampler, logits, 3, 4), expected)
    start(sampler, 3, SamplingParams(logit_bias={5: 1.0}))  # nothing of the former is left
    expected = logits[0].clone()
    expected[5] += 1.0
    torch.testing.assert_close(adjusted(sampler, logits, 3, 4), expected)


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_min_tokens_forbids_every_end_until_then(ignore_eos: bool) -> None:
    sampler = make_sampler()
    start(sampler, 0, SamplingParams(min_tokens=3, stop_token_ids=(8, 9), ignore_eos=ignore_eos))
    logits = random_logits(1)
    ends = [8, 9] if ignore_eos else [EOS, 8, 9]
    for num_outputs in range(5):
        ids = torch.zeros(1, len(PROMPT) + num_outputs, dtype=torch.long)
        processor = MinNewTokensLengthLogitsProcessor(len(PROMPT), 3, ends)
        expected = processor(ids, logits.clone())[0]
        got = adjusted(sampler, logits, 0, len(PROMPT) + num_outputs)
        assert torch.equal(got, expected)
        assert (got == -torch.inf).sum() == (len(ends) if num_outputs < 3 else 0)


def test_a_ban_on_every_token_is_an_error_of_that_row() -> None:
    sampler = make_sampler(vocab_size=4)
    start(sampler, 0, SamplingParams(min_tokens=1, stop_token_ids=(0, 1, 2, 3)))
    start(sampler, 1, GREEDY)
    tokens = sample(sampler, torch.eye(4)[:2], [0, 1])
    assert tokens.token_ids == [-1, 1]
    assert list(tokens.errors) == [0]


def test_logprobs_are_those_of_the_raw_logits() -> None:
    """Bias, penalties, temperature and filters change the choice but not the report."""
    sampler = make_sampler()
    start(sampler, 0, SamplingParams(temperature=0.5, top_k=3, logit_bias={7: 50.0}, logprobs=4), seed=1)
    start(sampler, 1, GREEDY)
    start(sampler, 2, SamplingParams(temperature=0.0, logprobs=0))
    logits = random_logits(3)
    tokens = sample(sampler, logits, [0, 1, 2])
    expected = torch.log_softmax(logits.double(), -1)
    assert tokens.logprobs is not None
    first, nothing, last = tokens.logprobs
    assert nothing is None
    assert first is not None
    assert last is not None
    assert first.token_id == tokens.token_ids[0] == 7
    assert first.logprob == pytest.approx(float(expected[0, 7]), abs=1e-5)
    best = expected[0].topk(4)
    assert [token_id for token_id, _ in first.top] == best.indices.tolist()
    assert [logprob for _, logprob in first.top] == pytest.approx(best.values.tolist(), abs=1e-5)
    assert last.top == ()
    assert last.logprob == pytest.approx(float(expected[2].max()), abs=1e-5)


def test_minus_infinity_is_reported_as_a_finite_number() -> None:
    sampler = make_sampler(vocab_size=5)
    start(sampler, 0, SamplingParams(temperature=0.0, logprobs=5, logit_bias={4: 1.0}))
    tokens = sample(sampler, torch.tensor([[0.0, -math.inf, -math.inf, 1.0, 2.0]]), [0])
    assert tokens.logprobs is not None
    assert tokens.logprobs[0] is not None
    assert [logprob for _, logprob in tokens.logprobs[0].top][3:] == [-9999.0, -9999.0]


def test_more_alternatives_than_the_vocabulary_has() -> None:
    sampler = make_sampler(vocab_size=3)
    start(sampler, 0, SamplingParams(temperature=0.0, logprobs=20))
    tokens = sample(sampler, torch.tensor([[0.0, 1.0, 2.0]]), [0])
    assert tokens.logprobs is not None
    assert tokens.logprobs[0] is not None
    assert len(tokens.logprobs[0].top) == 3


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_bad_row_fails_alone(bad: float) -> None:
    """Whatever it wanted: its neighbours get what they get beside a good one."""
    for place, params in enumerate(NEIGHBOURS):
        good, hurt = make_sampler(), make_sampler()
        for sampler in (good, hurt):
            for row, neighbour in enumerate(NEIGHBOURS):
                start(sampler, row, neighbour, seed=row)
        rows = list(range(len(NEIGHBOURS)))
        for step in range(3):
            logits = random_logits(len(rows), step)
            expected = sample(good, logits, rows, 4 + step)
            logits[place, 100] = bad
            got = sample(hurt, logits, rows, 4 + step)
            assert list(got.errors) == [place], params
            assert "not finite" in got.errors[place]
            assert got.token_ids[place] == -1
            others = [i for i in rows if i != place]
            assert [got.token_ids[i] for i in others] == [expected.token_ids[i] for i in others]
            if got.logprobs is not None and expected.logprobs is not None:
                assert got.logprobs[place] is None
                assert [got.logprobs[i] for i in others] == [expected.logprobs[i] for i in others]


def test_a_bad_row_leaves_a_valid_id_on_the_device() -> None:
    sampler = make_sampler()
    start(sampler, 0, SamplingParams())
    sampled = sampler.sample(torch.full((1, VOCAB), math.nan), np.array([0]), np.array([4]))
    assert sampled.token_ids.tolist() == [0]
    assert sampled.is_bad.tolist() == [True]


def test_a_bad_token_is_not_counted() -> None:
    sampler = make_sampler()
    start(sampler, 0, SamplingParams(temperature=0.0, presence_penalty=2.0))
    sample(sampler, torch.full((1, VOCAB), math.nan), [0])
    logits = torch.zeros(1, VOCAB)
    logits[0, 0] = 1.0
    assert sample(sampler, logits, [0], 5).token_ids == [0]


def test_a_row_keeps_nothing_of_the_sequence_before() -> None:
    sampler = make_sampler()
    start(sampler, 0, NEIGHBOURS[4], outputs=[1, 2, 3])
    start(sampler, 0, NEIGHBOURS[5], outputs=[1, 2, 3])
    start(sampler, 0, GREEDY)
    logits = random_logits(1)
    logits[0, 3] = 100.0
    tokens = sample(sampler, logits, [0])
    assert tokens.token_ids == [3]
    start(sampler, 0, SamplingParams(temperature=0.0, presence_penalty=2.0), prompt=[5])
    logits = torch.zeros(1, VOCAB)
    logits[0, 3], logits[0, 6] = 1.0, 0.5
    assert sample(sampler, logits, [0], 1).token_ids == [3]


def test_a_penalised_row_keeps_no_prompt_of_the_one_before() -> None:
    sampler = make_sampler()
    params = SamplingParams(repetition_penalty=2.0)
    start(sampler, 0, params, prompt=[9, 10], outputs=[11])
    start(sampler, 0, params, prompt=[5])
    logits = torch.ones(1, VOCAB)
    expected = torch.ones(VOCAB)
    expected[5] = 0.5
    assert torch.equal(adjusted(sampler, logits, 0, 1), expected)

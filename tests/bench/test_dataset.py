"""Where a load's prompts come from."""

import json
from pathlib import Path
from typing import Any

import pytest
from doubles_http import demo_tokenizer, in_loop

from aserve.bench.clients import LoadRequest, RequestTiming
from aserve.bench.dataset import (
    TextScale,
    conversation_requests,
    measure_scale,
    random_requests,
)
from aserve.bench.load import Arrivals, split_load
from aserve.bench.workload import LengthRange, WorkloadShape
from aserve.errors import AserveError, ClientError
from aserve.tokenizer.stand_in import build_stand_in_tokenizer
from aserve.tokenizer.tokenizer import Tokenizer

SHAPE = WorkloadShape(30, LengthRange(40, 400), LengthRange(3, 9), seed=4)
TOKENIZERS = [demo_tokenizer, lambda: Tokenizer(*build_stand_in_tokenizer({"vocab_size": 1000}))]


class CountingClient:
    """Answers with the number of tokens that a tokenizer makes of a chat."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer

    async def complete(self, request: LoadRequest) -> RequestTiming:
        timing = RequestTiming(0.0)
        if self._tokenizer is None:
            timing.error = "no"
        else:
            timing.num_prompt_tokens = len(self._tokenizer.encode_chat([{"role": "user", "content": request.prompt}]))
        return timing

    def close(self) -> None:
        pass


@pytest.mark.parametrize("make", TOKENIZERS, ids=["demo", "bytes"])
@in_loop
async def test_texts_have_the_wanted_length_in_the_servers_tokens(make: Any) -> None:
    tokenizer = make()
    scale = await measure_scale(CountingClient(tokenizer), 0)
    requests = random_requests(SHAPE, scale)
    ids = random_requests(SHAPE, None)
    for request, wanted in zip(requests, ids, strict=True):
        count = len(tokenizer.encode_chat([{"role": "user", "content": request.prompt}]))
        assert count == pytest.approx(len(wanted.prompt), abs=max(3, scale.per_word / 2 + 1))
        assert request.output_len == wanted.output_len
    assert len({str(request.prompt)[:6] for request in requests}) == 30


@in_loop
async def test_a_server_that_fails_at_once_is_an_error() -> None:
    with pytest.raises(AserveError, match="does not answer the first request: no"):
        await measure_scale(CountingClient(None), 0)


def test_a_prompt_is_never_empty() -> None:
    assert TextScale(fixed=50.0, per_word=1.0).words_for(3) == 1


def write(path: Path, content: Any) -> str:
    path.write_text(json.dumps(content))
    return str(path)


def talk(*turns: tuple[str, str]) -> dict[str, Any]:
    return {"id": "x", "conversations": [{"from": who, "value": value} for who, value in turns]}


def test_conversations_give_the_first_human_turn_and_the_length_of_its_answer(tmp_path: Path) -> None:
    talks = [
        talk(("human", "question one"), ("gpt", "a" * 100), ("human", "more")),
        talk(("system", "be kind"), ("human", "question two"), ("gpt", "b" * 100_000)),
        talk(("human", "question three")),
        talk(("gpt", "unasked"), ("human", "late")),
        talk(("human", "")),
        {"conversations": "none"},
        "junk",
    ]
    file = write(tmp_path / "talks.json", talks)
    requests = conversation_requests(file, 3, None, seed=1)
    assert {(r.prompt, r.output_len) for r in requests} == {
        ("question one", 25), ("question two", 1024), ("question three", 1),
    }  # fmt: skip
    assert {r.output_len for r in conversation_requests(file, 3, LengthRange(7, 7), seed=1)} == {7}
    assert conversation_requests(file, 2, None, seed=5) == conversation_requests(file, 2, None, seed=5)
    with pytest.raises(ClientError, match="has 3 conversations that begin with a human turn, not 4"):
        conversation_requests(file, 4, None, seed=1)


@pytest.mark.parametrize(("content", "told"), [(None, "cannot read"), ("{", "not valid JSON"), ("{}", "a list")])
def test_a_file_that_cannot_be_used_is_named(tmp_path: Path, content: str | None, told: str) -> None:
    file = tmp_path / "talks.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ClientError, match=told) as caught:
        conversation_requests(str(file), 1, None, seed=0)
    assert str(file) in str(caught.value)


def test_streams_of_the_closed_loop_begin_spread_out() -> None:
    requests = [LoadRequest(str(number), 1) for number in range(10)]
    shares = split_load(requests, Arrivals(concurrency=4, stagger_s=2.0), 2, seed=0)
    assert [share.starts_s for share in shares] == [[0.0, 1.0], [0.5, 1.5]]
    assert sorted(str(r.prompt) for share in shares for r in share.requests) == sorted(map(str, range(10)))
    assert len(split_load(requests, Arrivals(concurrency=3), 8, seed=0)) == 3
    assert len(split_load(requests[:2], Arrivals(concurrency=8), 4, seed=0)) == 2


def test_arrivals_of_the_open_loop_are_poisson() -> None:
    requests = [LoadRequest("", 1)] * 4000
    shares = split_load(requests, Arrivals(rate=50.0), 3, seed=0)
    assert all(share.is_open and len(share.starts_s) == len(share.requests) for share in shares)
    starts = sorted(start for share in shares for start in share.starts_s)
    gaps = [b - a for a, b in zip([0.0, *starts], starts, strict=False)]
    mean = sum(gaps) / len(gaps)
    spread = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert mean == pytest.approx(1 / 50, rel=0.08)  # 5 standard errors
    assert spread / mean == pytest.approx(1.0, rel=0.08)  # as of an exponential distribution

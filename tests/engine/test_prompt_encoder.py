"""What waits for a tokenizer thread: bounded together with the scheduler's queue, and forgotten when nobody waits."""

import asyncio
import threading

import pytest
from doubles_engine import (
    LIMITS,
    LetterTokenizer,
    RecordingSink,
    ScriptedRunner,
    letters,
    request,
    running_engine,
    until,
)

from aserve.engine.prompt_encoder import NUM_THREADS, PromptEncoder
from aserve.errors import CapacityError, ClientError


class SlowTokenizer(LetterTokenizer):
    """Encodes only while its gate is open, and notes what it has begun."""

    def __init__(self):
        self.gate = threading.Event()
        self.begun = []

    def encode(self, text, add_special_tokens=True, *, max_tokens=None):
        self.begun.append(text)
        assert self.gate.wait(10)
        return super().encode(text)


def make_encoder(tokenizer, max_queued_requests=6, num_waiting=0):
    return PromptEncoder(tokenizer, 100, max_queued_requests=max_queued_requests, num_waiting=lambda: num_waiting)


def start(encoder, text):
    return asyncio.create_task(encoder.encode(text, None, False))


@pytest.mark.parametrize("num_waiting", [0, 2])
async def test_encodings_and_waiting_requests_share_one_bound(num_waiting):
    tokenizer = SlowTokenizer()
    encoder = make_encoder(tokenizer, 6, num_waiting)
    tasks = [start(encoder, f"text {number}") for number in range(6 - num_waiting)]
    await until(lambda: len(tokenizer.begun) == NUM_THREADS)
    with pytest.raises(CapacityError, match="6 requests"):
        await encoder.encode("one more", None, False)
    with pytest.raises(CapacityError):
        await encoder.encode([{"content": "one more"}], None, False)
    assert await encoder.encode([97], None, False) == [97]  # nothing to encode; the scheduler's own bound comes next
    tokenizer.gate.set()
    assert await asyncio.gather(*tasks) == [list(map(ord, f"text {number}")) for number in range(6 - num_waiting)]
    assert "one more" not in tokenizer.begun
    assert encoder.num_pending == 0
    await encoder.encode("again", None, False)
    encoder.close()


async def test_what_nobody_waits_for_is_not_encoded():
    tokenizer = SlowTokenizer()
    encoder = make_encoder(tokenizer)
    tasks = [start(encoder, f"text {number}") for number in range(6)]
    await until(lambda: len(tokenizer.begun) == NUM_THREADS)
    for task in tasks[1:5]:
        task.cancel()
    await asyncio.wait(tasks[1:5])
    assert encoder.num_pending == 2
    tokenizer.gate.set()
    await asyncio.gather(tasks[0], tasks[5])
    encoder.close()
    assert sorted(tokenizer.begun) == ["text 0", "text 1", "text 5"]  # the second had begun


async def test_a_failed_encoding_does_not_stay_counted():
    class BrokenTokenizer(LetterTokenizer):
        def encode(self, text, add_special_tokens=True, *, max_tokens=None):
            raise ClientError("no")

    encoder = make_encoder(BrokenTokenizer())
    for _ in range(10):
        with pytest.raises(ClientError, match="no"):
            await encoder.encode("x", None, False)
    assert encoder.num_pending == 0
    encoder.close()


async def test_the_engines_queue_counts():
    runner = ScriptedRunner(LIMITS, letters, step_time_s=None)
    async with running_engine(runner, max_queued_requests=3) as engine:
        for number in range(3):
            engine.add(request(str(number), "abc"), RecordingSink())
        with pytest.raises(CapacityError):
            await engine.encode("abc")
        for number in range(3):
            engine.abort(str(number))
        assert await engine.encode("abc") == [97, 98, 99]


@pytest.mark.parametrize(
    "prompt", [None, 5, 1.5, {"role": "user"}, b"abc", bytearray(b"abc"), {1, 2}, object(), iter([1])]
)
async def test_what_is_no_prompt_is_the_clients_error(prompt):
    encoder = make_encoder(LetterTokenizer())
    with pytest.raises(ClientError, match=type(prompt).__name__):
        await encoder.encode(prompt, None, False)
    encoder.close()


async def test_messages_are_objects_without_exception():
    encoder = make_encoder(LetterTokenizer())
    for prompt in ([{"content": "a"}, "b"], [{"content": "a"}, None], [{"content": "a"}, 7]):
        with pytest.raises(ClientError, match="each message"):
            await encoder.encode(prompt, None, False)
    encoder.close()


@pytest.mark.parametrize("prompt", [["a", "b"], [None], [[1, 2]], [97, {"content": "a"}]])
async def test_a_list_of_something_else_is_refused_by_the_engine(prompt):
    async with running_engine(ScriptedRunner(LIMITS, letters)) as engine:
        with pytest.raises(ClientError, match="integers"):
            async for _ in engine.generate(prompt):
                pass

"""Aborts, ends and arrivals at every point of the pipeline, on a device that completes a step only when told.

The device double keeps KV by page and fails a step that reads another sequence's (cases B27, B20).
"""

import asyncio
import random

import pytest
from doubles_engine import (
    EOS,
    LIMITS,
    CheckedRunner,
    RecordingSink,
    letters,
    mixed,
    request,
    running_engine,
    settle,
    speak,
)

from aserve.request import FinishReason, SamplingParams
from aserve.scheduler.limits import Limits

TINY = Limits(vocab_size=256, max_model_len=40, max_num_seqs=3, max_num_batched_tokens=5, num_pages=14, page_size=2)


def held_pages(engine):
    return engine.stats().scheduler.num_held_pages


async def complete_all(runner):
    while runner.launched:
        assert runner.complete_next() is not None
        await settle()


async def test_pages_of_an_ended_request_wait_for_the_step_in_flight():
    runner = CheckedRunner(LIMITS, speak("ab", 3), step_time_s=None)
    async with running_engine(runner, prefix_cache=False) as engine:
        sink = RecordingSink()
        engine.add(request("r", "abc"), sink)
        await settle()
        while not sink.is_ended:
            assert runner.complete_next() is not None
            await settle()
        assert len(runner.launched) == 1  # the step ahead computes one token too many
        assert held_pages(engine) > 0
        engine._steps.scheduler.check_integrity()
        await complete_all(runner)
        assert held_pages(engine) == 0
        assert sink.token_ids == [*map(ord, "ab"), EOS]


def expected(prompt, max_tokens, script):
    """What the script says, stopped as the request says: the oracle has no engine in it."""
    tokens = list(map(ord, prompt))
    while len(tokens) - len(prompt) < max_tokens:
        tokens.append(script(tokens, len(tokens)))
        if tokens[-1] == EOS:
            break
    return tokens[len(prompt) :]


@pytest.mark.parametrize("num_turns", [0, 1, 2, 30])
@pytest.mark.parametrize("num_completed", range(7))
async def test_abort_twice_at_each_point_frees_once(num_completed, num_turns):
    runner = CheckedRunner(TINY, speak("abcd", 7), step_time_s=None)  # two prefill steps, then EOS in the sixth
    async with running_engine(runner) as engine:
        sink, neighbour = RecordingSink(), RecordingSink()
        engine.add(request("r", "abcdefg"), sink)
        engine.add(request("n", "tuvwxyz", max_tokens=9, ignore_eos=True), neighbour)
        await settle()
        for number in range(num_completed):
            if runner.launched:
                runner.complete_next()
            await settle(num_turns if number == num_completed - 1 else 30)
        was_open = not sink.is_ended
        assert engine.abort("r") is was_open
        assert engine.abort("r") is False
        engine._steps.scheduler.check_integrity()
        while not neighbour.is_ended:
            await complete_all(runner)
        await complete_all(runner)
        engine._steps.scheduler.check_integrity()
        assert held_pages(engine) == 0
        assert sink.token_ids == [*map(ord, "abcd"), EOS][: len(sink.token_ids)]
        assert sink.finish_reason is (FinishReason.ABORT if was_open else FinishReason.STOP)
        assert sink.num_late_calls == neighbour.num_late_calls == 0
        assert neighbour.token_ids == [*map(ord, "abcd"), *[EOS] * 5]
        assert engine.stats().num_aborts == was_open


async def test_a_stop_string_ends_the_request_though_more_tokens_are_on_their_way():
    runner = CheckedRunner(LIMITS, speak("one, two, three, four", 1), step_time_s=None)
    async with running_engine(runner) as engine:
        sink = RecordingSink()
        engine.add(request("r", "x", stop=("two",)), sink)
        await settle()
        await complete_all(runner)
        assert (sink.text, sink.finish_reason) == ("one, ", FinishReason.STOP)
        assert sink.outputs[-1].stop_reason == "two"
        assert sink.outputs[-1].num_output_tokens == len("one, two") == len(sink.token_ids)
        assert engine.metrics.finished[FinishReason.STOP] == 1


async def test_a_new_request_may_take_the_id_of_one_that_just_ended():
    runner = CheckedRunner(LIMITS, letters, step_time_s=None)
    async with running_engine(runner) as engine:
        first, second = RecordingSink(), RecordingSink()
        engine.add(request("r", "abc", max_tokens=8), first)
        await settle()
        for _ in range(3):
            runner.complete_next()
            await settle()
        runner.complete_next()  # its delta is on its way
        engine.abort("r")
        engine.add(request("r", "xyz", max_tokens=8), second)
        await settle()
        await complete_all(runner)
        assert second.token_ids == expected("xyz", 8, letters)
        assert first.token_ids == expected("abc", 8, letters)[: len(first.token_ids)]


class Client:
    """One request of a random scenario: reads its outputs as they come, slowly, or leaves."""

    def __init__(self, rng, request_id):
        self.request_id = request_id
        self.prompt = "".join(rng.choices("abcdef", k=rng.randint(1, 9)))
        self.max_tokens = rng.randint(1, 12)
        self.delay = rng.choice((0, 0, 1, 5))
        self.patience = rng.choice((None, None, None, 0, 1, 3))  # outputs taken before it leaves
        self.token_ids = []
        self.finish_reason = None

    async def run(self, engine):
        params = SamplingParams(max_tokens=self.max_tokens)
        taken = 0
        stream = engine.generate(list(map(ord, self.prompt)), params, request_id=self.request_id)
        async for output in stream:
            self.token_ids += output.token_ids
            self.finish_reason = output.finish_reason
            taken += 1
            if self.patience is not None and taken > self.patience:
                break
            for _ in range(self.delay):
                await asyncio.sleep(0)
        await stream.aclose()

    def check(self):
        right = expected(self.prompt, self.max_tokens, mixed)
        if self.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            assert self.token_ids == right
            assert self.finish_reason is (FinishReason.STOP if right[-1] == EOS else FinishReason.LENGTH)
        else:
            assert self.token_ids == right[: len(self.token_ids)]


async def play(engine, runner, rng, name):
    """Let a few clients come, read and leave while the device completes steps at random moments."""
    clients = [Client(rng, f"{name}/{number}") for number in range(rng.randint(1, 5))]
    tasks = []
    waiting = list(clients)
    while waiting or runner.launched or not all(task.done() for task in tasks):
        choice = rng.random()
        if waiting and choice < 0.2:
            tasks.append(asyncio.create_task(waiting.pop().run(engine)))
        elif runner.launched and choice < 0.8:
            assert runner.complete_next() is not None
        elif choice > 0.97:
            engine.abort(rng.choice(clients).request_id)
        for _ in range(rng.choice((0, 1, 1, 2, 4))):
            await asyncio.sleep(0)
    for task in tasks:
        task.result()
    for client in clients:
        client.check()


async def play_many(seed, num_scenarios, **settings):
    rng = random.Random(seed)
    runner = CheckedRunner(TINY, mixed, step_time_s=None)
    async with running_engine(runner, **settings) as engine:
        for number in range(num_scenarios):
            await play(engine, runner, rng, number)
            await settle(3)
            engine._steps.scheduler.check_integrity()
            stats = engine.stats()
            assert (stats.num_open, stats.num_running, stats.num_waiting) == (0, 0, 0)
            assert stats.scheduler.num_held_pages == 0
        return stats


@pytest.mark.parametrize("part", range(8))
async def test_random_interleavings_give_what_each_request_gets_alone(part):
    stats = await play_many(part, 1250, prefix_cache=part % 2 == 0)
    assert stats.scheduler.num_preemptions > 25
    assert stats.num_aborts > 25


async def test_without_overlap_the_outputs_are_the_same():
    await play_many(17, 500, overlap=False)


async def test_without_overlap_a_step_is_planned_only_after_the_one_before_was_delivered():
    runner = CheckedRunner(LIMITS, letters, step_time_s=None)
    async with running_engine(runner, overlap=False) as engine:
        sink = RecordingSink()
        engine.add(request("r", "abc", max_tokens=5), sink)
        for number in range(5):
            await settle()
            assert len(runner.launched) == 1
            assert len(sink.token_ids) == number
            runner.complete_next()
        await settle()
        assert not runner.launched


async def test_a_request_joins_while_the_steps_of_another_are_in_flight():
    runner = CheckedRunner(LIMITS, letters, step_time_s=None)
    async with running_engine(runner) as engine:
        sinks = RecordingSink(), RecordingSink()
        engine.add(request("last", "abc", max_tokens=1), sinks[0])
        await settle()
        assert len(runner.launched) == 1  # its only token is on the way: nothing more to plan
        engine.add(request("new", "xyz", max_tokens=4), sinks[1])
        await settle()
        assert len(runner.launched) == 2  # launched at once, not after the first step's end
        await complete_all(runner)
        assert sinks[1].token_ids == expected("xyz", 4, letters)


WIDE = Limits(
    vocab_size=256, max_model_len=64, max_num_seqs=100, max_num_batched_tokens=512, num_pages=999, page_size=4
)


@pytest.mark.parametrize("num_turns", range(1, 6))
async def test_an_abort_between_commit_and_delivery_lets_nothing_follow(num_turns):
    runner = CheckedRunner(WIDE, letters, step_time_s=None)
    async with running_engine(runner) as engine:
        sinks = [RecordingSink() for _ in range(100)]
        for number, sink in enumerate(sinks):
            engine.add(request(str(number), "abc", max_tokens=20), sink)
        for _ in range(3):
            await settle()
            runner.complete_next()
        await settle(num_turns)  # some chunks of the fan-out have gone, some wait
        for number in range(0, 100, 2):
            assert engine.abort(str(number))
        await settle()
        while runner.launched:
            await complete_all(runner)
        right = expected("abc", 20, letters)
        for number, sink in enumerate(sinks):
            assert sink.finish_reason is (FinishReason.LENGTH if number % 2 else FinishReason.ABORT)
            assert sink.token_ids == right[: len(sink.token_ids)]
            assert sink.num_late_calls == 0
        assert len(sinks[1].token_ids) == 20


async def test_a_sink_that_raises_ends_its_own_request_only():
    class BrokenSink(RecordingSink):
        def put(self, output):
            raise OSError("a bug in a sink")

    runner = CheckedRunner(LIMITS, letters, step_time_s=None)
    async with running_engine(runner) as engine:
        good = RecordingSink()
        engine.add(request("bad", "abc", max_tokens=20), BrokenSink())
        engine.add(request("good", "abc", max_tokens=20), good)
        await settle()
        while runner.launched:
            await complete_all(runner)
        assert engine.is_alive
        assert good.token_ids == expected("abc", 20, letters)
        assert engine.stats().num_open == 0


async def test_a_sink_may_abort_its_own_request_and_others_while_it_is_called():
    runner = CheckedRunner(LIMITS, letters, step_time_s=None)
    async with running_engine(runner) as engine:

        class ImpatientSink(RecordingSink):
            def put(self, output):
                super().put(output)
                if len(self.outputs) == 3:
                    engine.abort("impatient")
                    engine.abort("neighbour")

        sinks = ImpatientSink(), RecordingSink()
        engine.add(request("impatient", "abc"), sinks[0])
        engine.add(request("neighbour", "abc"), sinks[1])
        await settle()
        while runner.launched:
            await complete_all(runner)
        assert [sink.finish_reason for sink in sinks] == [FinishReason.ABORT] * 2
        assert [sink.num_late_calls for sink in sinks] == [0, 0]
        assert engine.stats().num_aborts == 2
        assert held_pages(engine) == 0

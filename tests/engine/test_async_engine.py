"""The facade on a scripted device: what callers see in every ending of a request."""

import asyncio
import gc
import sys
from typing import NamedTuple

import pytest
from doubles_engine import (
    EOS,
    LIMITS,
    LetterTokenizer,
    RecordingSink,
    ScriptedRunner,
    letters,
    request,
    running_engine,
    settle,
    speak,
    until,
)
from prometheus_client.parser import text_string_to_metric_families

from aserve.config import EngineConfig
from aserve.engine.async_engine import AsyncEngine
from aserve.engine.replay import replay_file
from aserve.errors import CapacityError, ClientError, EngineDeadError
from aserve.request import FinishReason, Request, SamplingParams
from aserve.runner.scripted import RowFailure
from aserve.scheduler.admission import check_tokens


async def collect(engine, prompt, params=None, **options):
    return [output async for output in engine.generate(prompt, params, **options)]


async def test_text_comes_in_order_and_ends_by_eos():
    async with running_engine(ScriptedRunner(LIMITS, speak("hello", 3))) as engine:
        outputs = await collect(engine, "abc")
    assert "".join(output.text for output in outputs) == "hello"
    assert [token for output in outputs for token in output.token_ids] == [*map(ord, "hello"), EOS]
    last = outputs[-1]
    assert (last.finish_reason, last.stop_reason) == (FinishReason.STOP, None)
    assert (last.num_prompt_tokens, last.num_output_tokens, last.num_cached_tokens) == (3, 6, 0)


async def test_prompts_may_be_text_token_ids_or_messages():
    async with running_engine(ScriptedRunner(LIMITS, letters)) as engine:
        params = SamplingParams(max_tokens=4)
        texts = [
            "".join([output.text for output in await collect(engine, prompt, params)])
            for prompt in ("ab\nc\n", [97, 98, 10, 99, 10], [{"role": "user", "content": "ab"}, {"content": "c"}])
        ]
    assert len(texts[0]) == 4
    assert texts == [texts[0]] * 3


async def test_many_at_once_get_what_each_gets_alone():
    prompts = [chr(97 + number) * (number % 7 + 1) for number in range(20)]
    params = SamplingParams(max_tokens=30)
    async with running_engine(ScriptedRunner(LIMITS, letters)) as engine:
        alone = [await collect(engine, prompt, params) for prompt in prompts]
        together = await asyncio.gather(*(collect(engine, prompt, params) for prompt in prompts))
    join = [["".join(output.text for output in outputs) for outputs in run] for run in (alone, together)]
    assert join[0] == join[1]


async def test_leaving_the_generator_aborts_once_and_a_normal_end_does_not():
    runner = ScriptedRunner(LIMITS, letters)
    async with running_engine(runner) as engine:
        for num_chunks in (0, 1, 5) * 5:
            stream = engine.generate("abc", SamplingParams(max_tokens=400))
            for _ in range(num_chunks):
                await anext(stream)
            await stream.aclose()
        assert engine.stats().num_aborts == 10  # a generator that was never started has asked for nothing
        for _ in range(50):
            await collect(engine, "abc", SamplingParams(max_tokens=2))
        stats = engine.stats()
        assert (stats.num_aborts, stats.num_open, stats.num_running, stats.num_waiting) == (10, 0, 0, 0)
        await until(lambda: not engine.stats().scheduler.num_in_flight)
        stats = engine.stats().scheduler
        assert stats.num_held_pages == 0


async def test_cancelling_the_consumer_aborts():
    runner = ScriptedRunner(LIMITS, letters, step_time_s=None)
    async with running_engine(runner) as engine:
        task = asyncio.create_task(collect(engine, [97]))
        await settle()
        assert engine.stats().num_running == 1
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (engine.stats().num_open, engine.stats().num_aborts) == (0, 1)
        while runner.launched:
            runner.complete_next()
            await settle()


async def test_abort_is_idempotent_and_tells_the_sink_once():
    runner = ScriptedRunner(LIMITS, speak("abcdef", 1), step_time_s=None)
    async with running_engine(runner) as engine:
        sink = RecordingSink()
        engine.add(request("r", "x", stop=["cdz"]), sink)
        for _ in range(4):
            await settle()
            runner.complete_next()
        await settle()
        assert sink.text == "ab"  # "cd" may become the stop string
        assert engine.abort("r") is True
        assert engine.abort("r") is False
        assert (sink.text, sink.finish_reason) == ("abcd", FinishReason.ABORT)
        assert engine.abort("unknown") is False
        assert sink.num_late_calls == 0
        while runner.launched:
            runner.complete_next()
            await settle()
        assert engine.stats().num_aborts == 1
        assert engine.metrics.finished[FinishReason.ABORT] == 1


async def test_a_slow_consumer_gets_merged_outputs_and_loses_nothing():
    async with running_engine(ScriptedRunner(LIMITS, letters)) as engine:
        params = SamplingParams(max_tokens=300, logprobs=1)
        whole = await collect(engine, "abc", params)
        stream = engine.generate("abc", params)
        outputs = [await anext(stream)]
        await until(lambda: not engine.stats().num_open)
        outputs += [output async for output in stream]
    assert len(outputs) <= 3
    assert outputs[-1].num_output_tokens == 300
    for field in ("text", "token_ids", "logprobs"):
        joined = [[item for output in run for item in getattr(output, field)] for run in (whole, outputs)]
        assert joined[0] == joined[1], field


async def test_one_rows_failure_is_its_own():
    def script(tokens, position):
        if tokens[0] == ord("x") and position == 5:
            raise RowFailure("no token has a finite score")
        return letters(tokens, position)

    async with running_engine(ScriptedRunner(LIMITS, script)) as engine:
        sinks = {prompt: RecordingSink() for prompt in ("abc", "xyz")}
        for prompt, sink in sinks.items():
            engine.add(request(prompt, prompt, max_tokens=20), sink)
        await until(lambda: not engine.stats().num_open)
        assert str(sinks["xyz"].error) == "no token has a finite score"
        assert len(sinks["xyz"].token_ids) == 2
        assert sinks["abc"].finish_reason is FinishReason.LENGTH
        assert (engine.is_alive, engine.is_ready) == (True, True)
        assert engine.metrics.finished[FinishReason.ERROR] == 1


class RaisingSink(RecordingSink):
    """Raises at the output with this number."""

    def __init__(self, place, is_deaf=False):
        super().__init__()
        self.place = place
        self.is_deaf = is_deaf

    def put(self, output):
        if len(self.outputs) == self.place:
            raise BrokenPipeError
        super().put(output)

    def fail(self, error):
        if self.is_deaf:
            raise BrokenPipeError
        super().fail(error)


async def test_a_sink_that_raises_is_told_that_its_request_failed_and_others_go_on():
    sinks = {"first": RaisingSink(0), "later": RaisingSink(3), "last": RaisingSink(9), "deaf": RaisingSink(2, True)}
    async with running_engine(ScriptedRunner(LIMITS, letters)) as engine:
        good = RecordingSink()
        for name, sink in (sinks | {"good": good}).items():
            engine.add(request(name, "abc", max_tokens=10), sink)
        await until(lambda: not engine.stats().num_open)
        assert engine.is_ready
        assert good.finish_reason is FinishReason.LENGTH
        for name, sink in sinks.items():
            assert (sink.error is None) == (name == "deaf")
            assert sink.num_late_calls == 0
            assert len(sink.outputs) == sink.place
        # the last output of "last" was counted before its sink raised
        assert engine.metrics.finished[FinishReason.ERROR] == 3
        assert engine.metrics.finished[FinishReason.LENGTH] == 2
        await until(lambda: not engine.stats().scheduler.num_in_flight)


class HoarseTokenizer(LetterTokenizer):
    """Its detokenizers raise at a "q"."""

    def detokenizer(self, skip_special_tokens):
        detokenizer = super().detokenizer(skip_special_tokens)
        push = detokenizer.push

        def raise_at_q(token_ids):
            if ord("q") in token_ids:
                raise KeyError("q")
            return push(token_ids)

        detokenizer.push = raise_at_q
        return detokenizer


async def test_a_detokenizer_that_raises_fails_its_request():
    async with running_engine(ScriptedRunner(LIMITS, speak("abqc", 1)), HoarseTokenizer()) as engine:
        sink = RecordingSink()
        engine.add(request("r", "x"), sink)
        await until(lambda: sink.is_ended)
        assert sink.error is not None
        assert sink.text == "ab"
        assert engine.metrics.finished[FinishReason.ERROR] == 1
        await until(lambda: not engine.stats().scheduler.num_in_flight)


async def test_a_deaf_sink_does_not_keep_a_failure_from_the_others():
    runner = ScriptedRunner(LIMITS, letters)
    runner.fail_step(3, RuntimeError("the device is gone"))
    async with running_engine(runner, trace_file="/dev/null/trace") as engine:
        sinks = [RaisingSink(-1, is_deaf=True), RecordingSink()]
        for number, sink in enumerate(sinks):
            engine.add(request(str(number), "abc"), sink)
        await until(lambda: sinks[1].is_ended)
        assert isinstance(sinks[1].error, EngineDeadError)


async def test_a_failed_step_fails_everyone_at_once_and_leaves_a_trace(tmp_path):
    runner = ScriptedRunner(LIMITS, letters)
    runner.fail_step(5, RuntimeError("the device is gone"))
    trace = tmp_path / "trace.jsonl"
    async with running_engine(runner, trace_file=str(trace), max_queued_requests=50) as engine:
        sinks = [RecordingSink() for _ in range(20)]  # eight run, the others wait
        for number, sink in enumerate(sinks):
            engine.add(request(str(number), "abc"), sink)
        consumer = asyncio.create_task(collect(engine, "abc"))
        with pytest.raises(EngineDeadError, match="the device is gone"):
            await consumer
        assert all(isinstance(sink.error, EngineDeadError) for sink in sinks)
        assert not any(sink.num_late_calls for sink in sinks)
        assert (engine.is_alive, engine.is_ready) == (False, False)
        assert str(engine.failure) == "the device is gone"
        with pytest.raises(EngineDeadError) as caught:
            engine.add(request("late", "abc"), RecordingSink())
        assert caught.value.__cause__ is engine.failure
        assert engine.stats().num_open == 0
    assert trace.stat().st_size > 0


async def test_a_launch_that_raises_ends_the_engine_too():
    runner = ScriptedRunner(LIMITS, letters)

    def launch(plan):
        raise MemoryError("no room")

    runner.launch = launch
    async with running_engine(runner, trace_file="/dev/null/trace") as engine:
        with pytest.raises(EngineDeadError, match="no room"):
            await collect(engine, "abc")


async def test_a_step_that_never_returns_is_noticed(tmp_path):
    runner = ScriptedRunner(LIMITS, letters)
    runner.stall_from(3)
    trace = tmp_path / "trace.jsonl"
    async with running_engine(runner, step_timeout_s=0.1, trace_file=str(trace)) as engine:
        assert engine.is_ready
        consumer = asyncio.create_task(collect(engine, "abc"))
        await until(lambda: not engine.is_ready and trace.exists())
        assert engine.is_alive
        assert engine.is_stalled
        consumer.cancel()
        with pytest.raises(asyncio.CancelledError):
            await consumer


async def test_drain_refuses_new_requests_and_lets_running_ones_end():
    async with running_engine(ScriptedRunner(LIMITS, letters, step_time_s=0.002)) as engine:
        running = asyncio.create_task(collect(engine, "abc", SamplingParams(max_tokens=20)))
        await until(lambda: engine.stats().num_open == 1)
        draining = asyncio.create_task(engine.drain(5))
        await settle()
        assert not engine.is_ready
        with pytest.raises(CapacityError, match="shutting down"):
            await collect(engine, "abc")
        assert await draining is True
        assert (await running)[-1].finish_reason is FinishReason.LENGTH


async def test_drain_ends_what_does_not_end_by_itself():
    async with running_engine(ScriptedRunner(LIMITS, letters, step_time_s=0.002)) as engine:
        running = asyncio.create_task(collect(engine, "abc"))
        await until(lambda: engine.stats().num_open == 1)
        assert await engine.drain(0.05) is False
        with pytest.raises(CapacityError):
            await running
        assert engine.stats().num_aborts == 1


async def test_stop_ends_open_requests_and_is_idempotent():
    runner = ScriptedRunner(LIMITS, letters, step_time_s=0.002)
    engine = AsyncEngine(EngineConfig(), runner=runner, tokenizer=LetterTokenizer())
    await engine.stop()  # before a start there is nothing to do
    engine = AsyncEngine(EngineConfig(), runner=runner, tokenizer=LetterTokenizer())
    assert engine.is_alive
    assert not engine.is_ready
    with pytest.raises(CapacityError, match="loading"):
        engine.add(request("early", "abc"), RecordingSink())
    await engine.start()
    running = asyncio.create_task(collect(engine, "abc"))
    await until(lambda: engine.stats().num_open == 1)
    await engine.stop()
    await engine.stop()
    with pytest.raises(EngineDeadError, match="stopped"):
        await running
    with pytest.raises(EngineDeadError):
        await collect(engine, "abc")
    assert runner.is_closed
    assert not engine.is_alive


async def test_what_the_process_had_is_restored():
    gc.unfreeze()  # some interpreters freeze what they start with
    before = sys.getswitchinterval(), gc.isenabled(), gc.get_freeze_count()
    async with running_engine(ScriptedRunner(LIMITS, letters, step_time_s=0.001)) as engine:
        assert sys.getswitchinterval() == pytest.approx(0.0005)
        assert gc.get_freeze_count() > 1000
        stream = engine.generate("abc")
        await anext(stream)
        assert not gc.isenabled()
        await stream.aclose()
        await until(lambda: not engine.stats().scheduler.num_in_flight)
        await settle()
        assert gc.isenabled()
    assert (sys.getswitchinterval(), gc.isenabled(), gc.get_freeze_count()) == before


@pytest.mark.parametrize(
    ("prompt", "word"),
    [
        ("", "no tokens"),
        ([], "no tokens"),
        ([256], "outside"),
        ([-1], "outside"),
        ([2**63], "outside"),
        ([1.5], "integers"),
        ([True], "integers"),
        ([97] * 512, "512"),
        ([97] * 10**6, "1000000"),
        ("a" * 4_000_000, "4000000"),
        ([{"content": "a" * 4_000_000}], "4000000"),
        ([{"content": "a"}] * 200_000, "200000"),
    ],
)
async def test_bad_prompts_are_refused_and_the_engine_goes_on(prompt, word):
    async with running_engine(ScriptedRunner(LIMITS, letters)) as engine:
        with pytest.raises(ClientError, match=word):
            await collect(engine, prompt)
        assert len(await collect(engine, "abc", SamplingParams(max_tokens=3))) >= 1


async def test_choices_check_their_common_prompt_once(monkeypatch):
    checked = []

    def note(prompt, limits):
        checked.append(len(prompt))
        check_tokens(prompt, limits)

    monkeypatch.setattr("aserve.engine.request_check.check_tokens", note)
    monkeypatch.setattr("aserve.scheduler.scheduler.check_tokens", note)
    async with running_engine(ScriptedRunner(LIMITS, letters)) as engine:
        prompts = [tuple([97 + number] * 300) for number in range(2)]
        for number in range(8):
            engine.add(
                Request(
                    request_id=str(number),
                    prompt_token_ids=prompts[number // 4],
                    params=SamplingParams(max_tokens=2),
                ),
                RecordingSink(),
            )
        assert checked == [300, 300]
        await until(lambda: not engine.stats().num_open)


class NamedPrompt(NamedTuple):
    first: int
    second: int


async def test_a_prompt_of_a_tuples_subclass_runs(tmp_path):
    async with running_engine(ScriptedRunner(LIMITS, letters)) as engine:
        sink = RecordingSink()
        engine.add(
            Request(request_id="r", prompt_token_ids=NamedPrompt(97, 98), params=SamplingParams(max_tokens=2)), sink
        )
        await until(lambda: sink.is_ended)
        assert replay_file(engine.dump_trace(tmp_path / "run.jsonl")).is_equal


async def test_a_bad_prompt_is_refused_each_time():
    async with running_engine(ScriptedRunner(LIMITS, letters)) as engine:
        for prompt in ((97, 256), (97, 1.5), (97, -1), (), (97,) * 512):
            for number in range(2):
                with pytest.raises(ClientError):
                    engine.add(
                        Request(request_id=str(number), prompt_token_ids=prompt, params=SamplingParams()),
                        RecordingSink(),
                    )


async def test_bad_parameters_are_refused():
    async with running_engine(ScriptedRunner(LIMITS, letters)) as engine:
        with pytest.raises(ClientError, match="stop_token_ids"):
            await collect(engine, "abc", SamplingParams(stop_token_ids=(256,)))
        sink = RecordingSink()
        engine.add(request("twice", "abc"), sink)
        with pytest.raises(ClientError, match="in use"):
            engine.add(request("twice", "abc"), RecordingSink())
        engine.abort("twice")


async def test_every_metric_that_is_promised_is_exported():
    async with running_engine(ScriptedRunner(LIMITS, letters)) as engine:
        for _ in range(2):
            await collect(engine, [97] * 41, SamplingParams(max_tokens=3, ignore_eos=True))
        engine.metrics.loop_lag.observe(0.001)
        families = {family.name: family for family in text_string_to_metric_families(engine.metrics.render().decode())}
        hits = engine.stats().scheduler.num_prefix_tokens_hit
    gauges = {
        "num_requests_running": 0,
        "num_requests_waiting": 0,
        "kv_pages_held": 0,
        "kv_cache_usage_ratio": 0,
        "prefix_cache_hit_ratio": 40 / 82,  # ten full pages of the second prompt
    }
    for name, value in gauges.items():
        assert families[f"aserve_{name}"].type == "gauge"
        assert families[f"aserve_{name}"].samples[0].value == pytest.approx(value), name
    assert hits == 40
    pages = sum(families[f"aserve_kv_pages_{kind}"].samples[0].value for kind in ("free", "cached", "held"))
    assert pages == LIMITS.num_pages
    counters = {
        "prompt_tokens": 82,
        "generation_tokens": 6,
        "prompt_tokens_cached": 40,
        "request_aborts": 0,
        "prefix_cache_queries": 82,
        "prefix_cache_hits": 40,
        "num_preemptions": 0,
    }
    for name, value in counters.items():
        assert families[f"aserve_{name}"].type == "counter"
        assert families[f"aserve_{name}"].samples[0].value == value, name
    finished = {sample.labels["finished_reason"]: sample.value for sample in families["aserve_request_success"].samples}
    assert finished == {"stop": 0, "length": 2, "abort": 0, "error": 0}
    histograms = {
        "time_to_first_token_seconds": 2,
        "inter_token_latency_seconds": 4,
        "e2e_request_latency_seconds": 2,
        "step_time_seconds": engine.metrics.num_steps,
        "loop_lag_seconds": 1,
    }
    for name, count in histograms.items():
        family = families[f"aserve_{name}"]
        assert family.type == "histogram"
        counts = [sample.value for sample in family.samples if sample.name.endswith("_count")]
        assert counts == [count], name
    edges = [
        sample.labels["le"]
        for sample in families["aserve_inter_token_latency_seconds"].samples
        if "le" in sample.labels
    ]
    assert sum(float(edge) < 0.01 for edge in edges) >= 5


async def test_a_full_queue_refuses():
    runner = ScriptedRunner(LIMITS, letters, step_time_s=None)
    async with running_engine(runner, max_queued_requests=3) as engine:
        for number in range(3):
            engine.add(request(str(number), "abc"), RecordingSink())
        with pytest.raises(CapacityError) as caught:
            engine.add(request("one more", "abc"), RecordingSink())
        assert caught.value.status in (429, 503)
        for number in range(3):
            engine.abort(str(number))


async def test_an_engine_starts_only_once_also_while_it_loads():
    engine = AsyncEngine(runner=ScriptedRunner(LIMITS, letters), tokenizer=LetterTokenizer())
    loading = asyncio.create_task(engine.start())
    await asyncio.sleep(0)
    with pytest.raises(EngineDeadError, match="only once"):
        await engine.start()
    await loading
    assert engine.is_ready
    await engine.stop()

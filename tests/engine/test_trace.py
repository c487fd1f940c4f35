"""Recording and replay: the same calls make the same plans, from the start, from a picture, and after a failure."""

import asyncio
import itertools
import random
import subprocess
import sys
import time

import orjson
import pytest
from doubles_engine import LIMITS, RecordingSink, ScriptedRunner, mixed, request, running_engine, until

from aserve.engine import snapshot
from aserve.engine.replay import replay_file
from aserve.engine.trace import FORCED_FACTOR, MAX_PICTURE_WEIGHT, TraceRing, make_scheduler
from aserve.errors import ClientError
from aserve.request import Request, SamplingParams
from aserve.scheduler.limits import Limits
from aserve.scheduler.plan import StepTokens

TINY = Limits(vocab_size=256, max_model_len=40, max_num_seqs=3, max_num_batched_tokens=5, num_pages=14, page_size=2)


async def work(engine, rng, num_requests=60):
    """Requests of every kind, some aborted, more than fit at once."""

    async def one(number):
        prompt = [97 + number % 5] * rng.randint(1, 12)
        params = SamplingParams(
            max_tokens=rng.randint(1, 12), stop=("x",), logit_bias={97: 1.0}, logprobs=1, prompt_logprobs=None
        )
        stream = engine.generate(prompt, params, priority=number % 3)
        async for _ in stream:
            if rng.random() < 0.02:
                break
        await stream.aclose()

    await asyncio.gather(*map(one, range(num_requests)))
    await until(lambda: not engine.stats().scheduler.num_in_flight)


@pytest.mark.parametrize("settings", [{}, {"prefix_cache": False, "overlap": False, "policy": "priority"}])
async def test_a_recorded_run_replays_exactly(tmp_path, settings):
    async with running_engine(ScriptedRunner(TINY, mixed), trace_steps=10_000, **settings) as engine:
        await work(engine, random.Random(1))
        path = engine.dump_trace(tmp_path / "run.jsonl")
        num_steps, num_aborts = engine.metrics.num_steps, engine.metrics.num_aborts
    report = replay_file(path)
    assert report.is_equal, str(report)
    assert (report.num_steps, report.num_requests) == (num_steps, 60)
    assert report.num_aborts >= num_aborts > 0
    assert "every plan is the recorded one" in str(report)


async def test_an_old_run_replays_from_a_picture_of_the_scheduler(tmp_path):
    async with running_engine(ScriptedRunner(TINY, mixed), trace_steps=20) as engine:
        for seed in range(8):  # idle in between
            await work(engine, random.Random(seed), 15)
            await asyncio.sleep(0.01)
        path = engine.dump_trace(tmp_path / "run.jsonl")
        num_steps = engine.metrics.num_steps
    head = orjson.loads(path.read_bytes().splitlines()[0])
    assert head["scheduler"] is not None
    report = replay_file(path)
    assert report.is_equal, str(report)
    assert 20 <= report.num_steps < num_steps


async def test_the_record_is_bounded_under_unbroken_load(tmp_path):
    async with running_engine(ScriptedRunner(TINY, mixed), trace_steps=2) as engine:
        await work(engine, random.Random(3), 200)
        num_steps = engine.metrics.num_steps
        path = engine.dump_trace(tmp_path / "run.jsonl")
    report = replay_file(path)
    assert report.is_equal, str(report)
    assert num_steps > 4 * 2 * FORCED_FACTOR  # it was cut while steps were in flight
    assert report.num_steps <= 2 * 2 * FORCED_FACTOR + 2


def heavy_ring(max_bytes):
    """A ring whose scheduler always holds too much for a picture, and a source of unbroken load for it."""
    settings = {"limits": orjson.loads(orjson.dumps(TINY)), "eos_token_ids": [2]}
    scheduler = make_scheduler(settings)
    ring = TraceRing(scheduler, settings, 2, max_bytes)
    numbers, prompt = itertools.count(), (97, 98, 99)

    def work():
        while scheduler.num_waiting < 3:
            one = request(str(next(numbers)), prompt, max_tokens=5, seed=1, ignore_eos=True)
            scheduler.add(one)
            ring.record_arrival(one)
        plan = scheduler.schedule()
        ring.record_plan(plan)
        tokens = StepTokens(plan.step_id, [97] * sum(plan.is_sampled))
        ring.record_tokens(tokens)
        scheduler.commit(tokens)
        ring.rotate(is_idle=False)

    return ring, work


def has_start(ring, place=0):
    """Say whether the head at this place of the record comes with the scheduler's state."""
    return [event["has_start"] for event in map(orjson.loads, ring.lines()) if "settings" in event][place]


def test_a_record_of_a_heavy_scheduler_is_bounded_by_bytes_and_says_that_it_has_no_start(tmp_path, monkeypatch):
    monkeypatch.setattr("aserve.engine.trace.MAX_PICTURE_WEIGHT", 0)
    monkeypatch.setattr(snapshot, "take", None)
    ring, work = heavy_ring(max_bytes=40_000)
    path = tmp_path / "run.jsonl"
    starts = set()
    for _ in range(400):
        work()
        assert sum(map(len, ring.lines())) <= 40_000 + 2_000
        ring.dump(path)
        starts.add(has_start(ring))
        if starts == {True}:
            assert replay_file(path).is_equal
    assert starts == {True, False}
    with pytest.raises(ClientError, match="starts in the middle"):
        replay_file(path)
    assert sum(map(len, ring.lines())) > 20_000


def test_a_record_without_a_start_replays_from_the_next_picture(tmp_path, monkeypatch):
    monkeypatch.setattr("aserve.engine.trace.MAX_PICTURE_WEIGHT", 0)
    ring, work = heavy_ring(max_bytes=20_000)
    for _ in range(200):
        work()
    monkeypatch.undo()
    while not has_start(ring, -1):
        work()
    assert not has_start(ring)
    for _ in range(7):
        work()
    path = tmp_path / "run.jsonl"
    ring.dump(path)
    report = replay_file(path)
    assert report.is_equal, str(report)
    assert report.num_steps == 7


@pytest.mark.alone
def test_a_picture_of_the_heaviest_scheduler_is_short():
    """Whether few long runs, many short ones or waiting prompts make the weight."""
    limits = Limits(
        vocab_size=50_000, max_model_len=8192, max_num_seqs=8, max_num_batched_tokens=8192, num_pages=20_000,
        page_size=16,
    )  # fmt: skip
    settings = {"limits": orjson.loads(orjson.dumps(limits)), "eos_token_ids": [2]}
    for kind in ("long runs", "short runs", "waiting"):
        scheduler = make_scheduler(settings)
        cache = scheduler._memory.cache
        rng = random.Random(1)
        while scheduler.weight < MAX_PICTURE_WEIGHT:
            tokens = [rng.randrange(50_000) for _ in range(16 if kind == "short runs" else 4800)]
            if kind == "waiting":
                scheduler.add(request(str(scheduler.num_waiting), tokens, seed=1))
            else:
                cache.insert(tokens, cache.allocate(len(tokens) // 16))
        durations = []
        for _ in range(5):
            start = time.thread_time()
            snapshot.take(scheduler)
            durations.append(time.thread_time() - start)
        print(kind, f"{min(durations) * 1e3:.1f} ms")
        assert min(durations) < 0.03


def test_the_choices_of_a_request_store_their_prompt_once(tmp_path):
    settings = {"limits": orjson.loads(orjson.dumps(LIMITS)), "eos_token_ids": [2]}
    scheduler = make_scheduler(settings)
    ring = TraceRing(scheduler, settings, 10)
    prompt = tuple([97 + number % 20 for number in range(500)])
    for choice in range(6):
        one = Request(request_id=f"c{choice}", prompt_token_ids=prompt, params=SamplingParams(seed=choice))
        scheduler.add(one)
        ring.record_arrival(one)
    other = request("other", "abc", seed=1)
    scheduler.add(other)
    ring.record_arrival(other)
    for _ in range(20):
        plan = scheduler.schedule()
        ring.record_plan(plan)
        tokens = StepTokens(plan.step_id, [98] * sum(plan.is_sampled))
        ring.record_tokens(tokens)
        scheduler.commit(tokens)
    path = tmp_path / "run.jsonl"
    ring.dump(path)
    assert path.read_bytes().count(orjson.dumps(prompt)[1:-1]) == 1
    report = replay_file(path)
    assert report.is_equal, str(report)
    assert (report.num_steps, report.num_requests) == (20, 7)


async def test_log_probabilities_are_not_recorded(tmp_path):
    async with running_engine(ScriptedRunner(TINY, mixed)) as engine:
        params = SamplingParams(max_tokens=9, logprobs=3, prompt_logprobs=3, ignore_eos=True)
        outputs = [output async for output in engine.generate("abcdef", params)]
        assert outputs[0].prompt_logprobs[1] is not None
        path = engine.dump_trace(tmp_path / "run.jsonl")
    assert b"top" not in path.read_bytes().replace(b"top_p", b"").replace(b"top_k", b"").replace(b"stop", b"")
    assert replay_file(path).is_equal


async def test_a_failed_engine_leaves_a_trace_that_replays(tmp_path):
    runner = ScriptedRunner(TINY, mixed)
    runner.fail_step(30, RuntimeError("broken"))
    path = tmp_path / "failed.jsonl"
    async with running_engine(runner, trace_file=str(path)) as engine:
        sinks = [RecordingSink() for _ in range(20)]
        for number, sink in enumerate(sinks):
            engine.add(request(str(number), "abc", max_tokens=30), sink)
        await until(lambda: not engine.is_alive)
    report = replay_file(path)
    assert report.is_equal, str(report)
    assert report.num_steps == 30


class TalkativeRunner(ScriptedRunner):
    """Answers for a row that was not asked for."""

    def execute(self, plan):
        tokens = super().execute(plan)
        tokens.token_ids += [97] * (plan.step_id == 5)
        return tokens


async def test_a_failure_of_the_scheduler_itself_is_found_again(tmp_path):
    path = tmp_path / "failed.jsonl"
    async with running_engine(TalkativeRunner(TINY, mixed), trace_file=str(path)) as engine:
        sink = RecordingSink()
        engine.add(request("r", "abc", max_tokens=30, ignore_eos=True), sink)
        await until(lambda: sink.is_ended)
        assert isinstance(engine.failure, ValueError)
    report = replay_file(path)
    assert not report.is_equal
    assert f"the scheduler raises {engine.failure!r}" in str(report)


async def test_a_changed_decision_is_found(tmp_path):
    async with running_engine(ScriptedRunner(TINY, mixed)) as engine:
        await work(engine, random.Random(4), 10)
        path = engine.dump_trace(tmp_path / "run.jsonl")
    lines = path.read_bytes().splitlines()
    place = [number for number, line in enumerate(lines) if b'"num_computed":[' in line][5]
    event = orjson.loads(lines[place])
    event["plan"]["num_scheduled"][0] += 1
    lines[place] = orjson.dumps(event)
    path.write_bytes(b"\n".join(lines))
    report = replay_file(path)
    assert not report.is_equal
    assert f"step {event['plan']['step_id']}: num_scheduled is" in str(report)


@pytest.mark.parametrize(
    "content", [b"", b"not json", b"[]", b'{"format":"other"}', b'{"format":"aserve-trace-2"}', b'{"a":', b"\xff\xfe"]
)
def test_a_file_that_is_no_trace_is_refused(tmp_path, content):
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(ClientError, match="not a trace"):
        replay_file(path)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(ClientError, match="cannot read"):
        replay_file(tmp_path / "none")


@pytest.mark.parametrize(
    "entries",
    [
        [["os:system", {}]],
        [["ref", "os:system"]],
        [["ref", "aserve.scheduler.scheduler:secrets.randbits"]],
        [["aserve.engine.async_engine:AsyncEngine", {}]],
        [["enum", ["signal:Signals", "SIGKILL"]]],
        [["nothing", {}]],
    ],
)
def test_a_picture_names_nothing_outside_the_host_packages(entries):
    with pytest.raises((ValueError, AttributeError)):
        snapshot.restore(entries)


def test_a_picture_keeps_shared_and_cyclic_references():
    first = {"self": None, "pair": (1, (2, "x")), "numbers": [1, 2.5, True, None]}
    first["self"] = first
    first["same"] = first["numbers"]
    first[1] = bytearray(b"ab")
    restored = snapshot.restore(orjson.loads(orjson.dumps(snapshot.take(first))))
    assert restored["self"] is restored
    assert restored["same"] is restored["numbers"] == [1, 2.5, True, None]
    assert restored["pair"] == (1, (2, "x"))
    assert restored[1] == bytearray(b"ab")


def test_a_picture_of_a_deep_tree_needs_no_recursion():
    deep = None
    for _ in range(10_000):
        deep = (deep, [1])
    depth = 0
    restored = snapshot.restore(snapshot.take([deep]))[0]
    while restored is not None:
        restored, depth = restored[0], depth + 1
    assert depth == 10_000


def test_what_has_no_place_in_a_trace_is_not_written():
    with pytest.raises(ValueError, match="no place"):
        snapshot.take([lambda: 1])
    with pytest.raises(ValueError, match="no place"):
        snapshot.take([subprocess.Popen.__new__(subprocess.Popen)])


def test_a_dump_replaces_the_file_as_a_whole(tmp_path):
    settings = {"limits": orjson.loads(orjson.dumps(LIMITS)), "eos_token_ids": [2]}
    ring = TraceRing(make_scheduler(settings), settings, 10)
    path = tmp_path / "new" / "trace.jsonl"
    ring.dump(path)
    ring.dump(path)
    assert [file.name for file in path.parent.iterdir()] == ["trace.jsonl"]
    assert replay_file(path).is_equal


def test_a_request_without_a_seed_would_not_replay():
    settings = {"limits": orjson.loads(orjson.dumps(LIMITS)), "eos_token_ids": [2]}
    with pytest.raises(RuntimeError, match="seed"):
        make_scheduler(settings).add(request("r", "abc"))


def test_the_command_replays_a_file(tmp_path):
    settings = {"limits": orjson.loads(orjson.dumps(LIMITS)), "eos_token_ids": [2]}
    path = tmp_path / "trace.jsonl"
    TraceRing(make_scheduler(settings), settings, 10).dump(path)
    command = [sys.executable, "-m", "aserve", "replay", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "0 steps" in done.stdout

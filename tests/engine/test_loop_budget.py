"""What a step costs on the event loop: exact counts, and time as a ratio to the least that any loop has to do."""

import asyncio
import time
from bisect import bisect_left
from collections import deque

import pytest
from doubles_engine import LetterTokenizer, ScriptedRunner, request, running_engine, settle, until

from aserve.engine.step_loop import FAN_OUT_STREAMS
from aserve.metrics import TOKEN_EDGES_S
from aserve.request import RequestOutput
from aserve.scheduler.delta import SequenceDelta
from aserve.scheduler.limits import Limits
from aserve.tokenizer.stop_strings import StopStringFilter

NUM_ROWS = 256
WIDE = Limits(
    vocab_size=256,
    max_model_len=4096,
    max_num_seqs=NUM_ROWS,
    max_num_batched_tokens=8192,
    num_pages=NUM_ROWS * 100,
    page_size=16,
)
STOPS = ("\n\n", "User:")


def say_a(tokens, position):
    return 97


class CountingSink:
    """Costs nothing and counts."""

    num_puts = 0

    def put(self, output):
        self.num_puts += 1

    def fail(self, error):
        raise error


class CountingLoop(asyncio.SelectorEventLoop):
    """Counts callbacks and tasks."""

    num_callbacks = num_tasks = 0

    def call_soon(self, *arguments, **options):
        self.num_callbacks += 1
        return super().call_soon(*arguments, **options)

    def call_soon_threadsafe(self, *arguments, **options):
        self.num_callbacks += 1
        return super().call_soon_threadsafe(*arguments, **options)

    def create_task(self, *arguments, **options):
        self.num_tasks += 1
        return super().create_task(*arguments, **options)


@pytest.mark.parametrize("num_rows", [1, 32, NUM_ROWS])
def test_no_task_and_no_callback_per_token(num_rows):
    num_steps, num_chunks = 50, -(-num_rows // FAN_OUT_STREAMS)

    async def run():
        loop = asyncio.get_running_loop()
        runner = ScriptedRunner(WIDE, say_a, step_time_s=None)
        async with running_engine(runner) as engine:
            sink = CountingSink()
            for number in range(num_rows):
                engine.add(request(str(number), "abc", max_tokens=1000), sink)
            for _ in range(3):
                await settle(30)
                runner.complete_next()
            await settle(30)
            puts, callbacks, tasks = sink.num_puts, loop.num_callbacks, loop.num_tasks
            settle_turns = num_chunks + 5
            for _ in range(num_steps):
                runner.complete_next()
                await settle(settle_turns)
            assert sink.num_puts - puts == num_steps * num_rows
            assert loop.num_tasks == tasks
            own = loop.num_callbacks - callbacks - num_steps * settle_turns
            # The device's wake-up, the event's, one turn for each chunk.
            assert own == num_steps * (num_chunks + 2)
            for number in range(num_rows):
                engine.abort(str(number))

    with asyncio.Runner(loop_factory=CountingLoop) as tests_own:
        tests_own.run(run())


class ObservingSink:
    """Tells the test about each put."""

    def __init__(self, observe):
        self.observe = observe

    def put(self, output):
        self.observe()

    def fail(self, error):
        raise error


async def test_the_next_step_is_launched_before_the_outputs_go_out():
    runner = ScriptedRunner(WIDE, say_a, step_time_s=None)
    launched_at_put = []
    async with running_engine(runner) as engine:
        sink = ObservingSink(lambda: launched_at_put.append(runner.num_launched))
        for number in range(NUM_ROWS):
            engine.add(request(str(number), "abc", max_tokens=3), sink)
        await settle()
        assert runner.num_launched == 2
        runner.complete_next()
        await settle(30)
        assert launched_at_put == [3] * NUM_ROWS
        while runner.launched:
            runner.complete_next()
            await settle(30)


async def test_a_step_that_completes_during_the_fan_out_waits_for_one_chunk_only():
    runner = ScriptedRunner(WIDE, say_a, step_time_s=None)
    puts, launches = [], {}

    def observe():
        puts.append(runner.num_launched)
        if len(puts) == 10:  # in the middle of the first chunk the device is done with the next step, too
            runner.complete_next()

    async with running_engine(runner) as engine:
        for number in range(NUM_ROWS):
            engine.add(request(str(number), "abc", max_tokens=4), ObservingSink(observe))
        await settle()
        runner.complete_next()
        await settle(60)
        for number, launched in enumerate(puts):
            launches.setdefault(launched, number)
        assert launches[4] - launches[3] == FAN_OUT_STREAMS
        while runner.launched:
            runner.complete_next()
            await settle(30)


async def test_a_loop_that_is_behind_holds_at_most_two_steps_of_outputs():
    runner = ScriptedRunner(WIDE, say_a, step_time_s=0.0)
    largest = 0

    async with running_engine(runner) as engine:

        def observe():
            nonlocal largest
            largest = max(largest, len(engine._steps._backlog))
            time.sleep(0.0001)  # sinks slower than the device

        for number in range(NUM_ROWS):
            engine.add(request(str(number), "abc", max_tokens=6), ObservingSink(observe))
        await until(lambda: not engine.stats().num_open)
    assert NUM_ROWS <= largest + 1 <= 2 * NUM_ROWS


class FloorRow:
    """The least that a request in progress consists of."""

    def __init__(self, number, sink):
        self.request_id = str(number)
        self.tokens = [97, 98, 99]
        self.num_computed = 3
        self.num_output = 0
        self.last_s = 0.0
        self.max_len = 1200
        self.stop_ids = frozenset({2})
        self.detokenizer = LetterTokenizer().detokenizer(True)
        self.stops = StopStringFilter(STOPS)
        self.sink = sink


async def floor_step(rows, counts):
    """Plan, commit, detokenise, check stops, measure and hand over, and nothing else but the loop's turns."""
    plan = [(row, row.num_computed) for row in rows]
    for row in rows:
        row.num_computed += 1
    tokens = [say_a(row.tokens, row.num_computed) for row, _ in plan]
    now = time.monotonic()
    backlog = deque()
    for row, token in zip(rows, tokens, strict=True):
        row.tokens.append(token)
        if token in row.stop_ids or len(row.tokens) >= row.max_len:
            raise AssertionError
        backlog.append((row, token, SequenceDelta(row.request_id, [token], 0)))
    while backlog:
        row, token, delta = backlog.popleft()
        if len(backlog) % FAN_OUT_STREAMS == 0:
            await asyncio.sleep(0)
        text, stop = row.stops.push(row.detokenizer.push([token]))
        if stop is not None:
            raise AssertionError
        row.num_output += 1
        counts[bisect_left(TOKEN_EDGES_S, now - row.last_s)] += 1
        row.last_s = now
        row.sink.put(RequestOutput(row.request_id, text, delta.token_ids, 3, row.num_output, 0, None, None, None, None))


async def settle_until(sink, target):
    """Run the loop until ``target`` outputs were put."""
    for _ in iter(lambda: sink.num_puts >= target, True):
        await asyncio.sleep(0)


async def best_of_seven(runner, sink, rows):
    """Return CPU seconds of a step, ours and the floor's: the best of seven times twenty interleaved pairs.

    Single steps are compared, because on a busy machine some of them find the caches to themselves.
    """
    counts = [0] * (len(TOKEN_EDGES_S) + 1)
    ours, floors = [], []
    for _ in range(7 * 20):
        runner.complete_next()
        start = time.thread_time()
        await settle_until(sink, sink.num_puts + NUM_ROWS)
        between = time.thread_time()
        await floor_step(rows, counts)
        ours.append(between - start)
        floors.append(time.thread_time() - between)
    best = min(ours), min(floors)
    print(f"{best[0] / NUM_ROWS * 1e6:.2f} us a row a step, floor {best[1] / NUM_ROWS * 1e6:.2f}")
    return best


@pytest.mark.alone
async def test_schedule_commit_text_stops_and_metrics_stay_near_the_floor():
    runner = ScriptedRunner(WIDE, say_a, step_time_s=None)
    async with running_engine(runner) as engine:
        sink, floor_sink = CountingSink(), CountingSink()
        for number in range(NUM_ROWS):
            engine.add(request(str(number), "abc", max_tokens=1200, stop=STOPS), sink)
        for _ in range(3):
            await settle(30)
            runner.complete_next()
        await settle(30)
        rows = [FloorRow(number, floor_sink) for number in range(NUM_ROWS)]
        ratios = []
        while len(ratios) < 7:  # 1.4 where nothing disturbs; neighbours of a virtual machine do for seconds at a time
            ours, floor = await best_of_seven(runner, sink, rows)
            ratios.append(ours / floor)
            if ratios[-1] <= 1.6:
                break
            await asyncio.sleep(1)
        for number in range(NUM_ROWS):
            engine.abort(str(number))
    assert min(ratios) <= 1.6, ratios

"""Sinks on a transport that is told when to be full: order, merging, bounds, keep-alive and the end."""

import asyncio
import time
from collections.abc import Callable, Sequence

import pytest
import uvloop
from doubles_engine import until
from hypothesis import given
from hypothesis import strategies as st

from aserve.errors import AserveError, CapacityError
from aserve.request import FinishReason, RequestOutput, TokenLogprobs
from aserve.server.heartbeat import Heartbeat
from aserve.server.stream_sink import MAX_PENDING_BYTES, Outlet, StreamSink


class Transport:
    """A connection whose reader is the test."""

    def __init__(self) -> None:
        self.is_writable = True
        self.is_closed = False
        self.is_aborted = False
        self.frames: list[bytes] = []
        self._callback: Callable[[], None] | None = None

    def write_frame(self, payload: bytes) -> None:
        self.frames.append(payload)

    def on_writable(self, callback: Callable[[], None] | None) -> None:
        self._callback = callback

    def on_close(self, callback: Callable[[], None]) -> None:
        pytest.fail("an outlet does not care")

    def abort(self) -> None:
        self.is_aborted = self.is_closed = True
        self.is_writable = False

    def drain(self) -> None:
        self.is_writable = True
        if self._callback:
            self._callback()


class Words:
    """Frames that show the text as it is, or nothing."""

    def frames(self, output: RequestOutput) -> Sequence[bytes]:
        text = output.text + ("." if output.finish_reason else "")
        return (text.encode(),) if text else ()

    def failure_frames(self, error: AserveError) -> Sequence[bytes]:
        return (f"error: {error}".encode(),)


def output(text: str, finish: FinishReason | None = None) -> RequestOutput:
    return RequestOutput("r", text, [1], 1, 1, 0, finish)


class Stream:
    """One sink on one transport."""

    def __init__(self, *, is_open: bool = True) -> None:
        self.transport = Transport()
        self.outlet = Outlet(self.transport, b"keep")
        self.ends = 0
        self.sink = StreamSink(self.outlet, Words(), self.count_end)
        if is_open:
            self.outlet.open()

    def count_end(self) -> None:
        self.ends += 1


def test_frames_go_out_at_once_one_by_one() -> None:
    stream = Stream()
    for text in ("a", "", "b"):
        stream.sink.put(output(text))
    stream.sink.put(output("c", FinishReason.STOP))
    assert stream.transport.frames == [b"a", b"b", b"c."]
    assert stream.ends == 1


def test_nothing_goes_out_before_the_head() -> None:
    stream = Stream(is_open=False)
    stream.sink.put(output("a"))
    stream.sink.put(output("b", FinishReason.STOP))
    assert (stream.transport.frames, stream.ends) == ([], 0)
    stream.outlet.open()
    assert (stream.transport.frames, stream.ends) == ([b"ab."], 1)


@given(st.lists(st.sampled_from(["put", "full", "drain"]), max_size=40), st.sampled_from(["end", "fail", "abort"]))
def test_a_slow_reader_gets_everything_once_and_in_order(actions: list[str], ending: str) -> None:
    stream = Stream()
    said = ""
    for number, action in enumerate(actions):
        if action == "put":
            said += f"{number},"
            stream.sink.put(output(f"{number},"))
        elif action == "full":
            stream.transport.is_writable = False
        else:
            stream.transport.drain()
    if ending == "end":
        stream.sink.put(output("last", FinishReason.LENGTH))
        said += "last."
    elif ending == "fail":
        stream.sink.fail(CapacityError("gone"))
        stream.sink.put(output("late", FinishReason.ABORT))  # what aborting the request after the failure brings
        said += "error: gone"
    else:
        stream.sink.put(output("held", FinishReason.ABORT))
        said += "helderror: the request was ended by the server"
    assert stream.ends == int(stream.transport.is_writable)
    stream.transport.drain()
    assert b"".join(stream.transport.frames).decode() == said
    assert stream.ends == 1
    stream.sink.fail(CapacityError("twice"))
    stream.sink.put(output("after", FinishReason.STOP))
    assert stream.ends == 1


def test_a_reader_that_fills_up_again_stops_the_flush_between_sinks() -> None:
    transport = Transport()
    outlet = Outlet(transport)
    outlet.open()
    sinks = [StreamSink(outlet, Words(), lambda: None) for _ in range(3)]
    transport.is_writable = False
    for name, sink in zip("abc", sinks, strict=True):
        sink.put(output(name))

    def fill(payload: bytes) -> None:
        transport.frames.append(payload)
        transport.is_writable = False

    transport.write_frame = fill  # type: ignore[method-assign]
    for expected in ([b"a"], [b"a", b"b"], [b"a", b"b", b"c"]):
        transport.drain()
        assert transport.frames == expected


@pytest.mark.parametrize("logprobs", [False, True])
def test_what_waits_is_bounded(logprobs: bool) -> None:
    stream = Stream()
    stream.transport.is_writable = False
    entry = TokenLogprobs(1, -1.0, tuple((i, -1.0) for i in range(20)))
    puts = 0
    while not stream.transport.is_aborted:
        one = output("x" * 100)
        one.logprobs = [entry] if logprobs else None
        stream.sink.put(one)
        puts += 1
        assert puts < MAX_PENDING_BYTES / 100
    assert stream.transport.frames == []


def test_the_bound_holds_for_all_requests_of_a_connection() -> None:
    transport = Transport()
    outlet = Outlet(transport)
    outlet.open()
    sinks = [StreamSink(outlet, Words(), lambda: None) for _ in range(128)]
    text = "x" * (MAX_PENDING_BYTES // 1280)  # 0.2 % of the bound

    def put_all(times: int) -> None:
        for sink in sinks * times:
            sink.put(output(text))

    for _ in range(5):  # what has been written is no longer held
        transport.is_writable = False
        put_all(4)
        assert not transport.is_aborted
        transport.drain()
    transport.is_writable = False
    put_all(8)
    assert transport.is_aborted


def test_a_frame_that_cannot_be_built_ends_in_an_error() -> None:
    class Broken(Words):
        def frames(self, output: RequestOutput) -> Sequence[bytes]:
            raise ValueError("broken")

    stream = Stream()
    stream.sink._builder = Broken()
    with pytest.raises(ValueError, match="broken"):
        stream.sink.put(output("last", FinishReason.STOP))
    stream.sink.fail(AserveError("told by the engine"))
    assert (stream.transport.frames, stream.ends) == ([b"error: told by the engine"], 1)


def beat(outlet: Outlet, times: int) -> None:
    for _ in range(times):
        outlet.beat(keep_alive_beats=3, stall_beats=5)


def test_silence_is_filled_and_speech_restarts_the_count() -> None:
    stream = Stream()
    beat(stream.outlet, 2)
    stream.sink.put(output("a"))
    beat(stream.outlet, 2)
    assert stream.transport.frames == [b"a"]
    beat(stream.outlet, 1)
    assert stream.transport.frames == [b"a", b"keep"]
    beat(stream.outlet, 3)
    assert stream.transport.frames == [b"a", b"keep", b"keep"]
    stream.outlet.close()
    beat(stream.outlet, 10)
    assert len(stream.transport.frames) == 3


def test_zero_means_no_keep_alive() -> None:
    stream = Stream()
    for _ in range(100):
        stream.outlet.beat(0, 5)
    assert stream.transport.frames == []


def test_a_stalled_reader_is_cut_off_and_a_slow_one_is_not() -> None:
    stream = Stream()
    for _ in range(5):
        stream.transport.is_writable = False
        beat(stream.outlet, 4)
        stream.transport.drain()
    assert not stream.transport.is_aborted
    stream.transport.is_writable = False
    beat(stream.outlet, 5)
    assert stream.transport.is_aborted


def test_the_heartbeat_runs_one_timer_while_it_has_members() -> None:
    class Member:
        beats = 0

        def beat(self, keep_alive_beats: int, stall_beats: int) -> None:
            assert (keep_alive_beats, stall_beats) == (4, 12)
            self.beats += 1

    async def run() -> None:
        heartbeat = Heartbeat(keep_alive_s=0.02, stall_timeout_s=0.06)
        members = [Member() for _ in range(3)]
        started = time.monotonic()
        for member in members:
            heartbeat.add(member)
        await until(lambda: members[0].beats >= 8)
        assert {member.beats for member in members} == {members[0].beats}
        assert members[0].beats * heartbeat.interval_s < time.monotonic() - started + heartbeat.interval_s
        for member in members:
            heartbeat.remove(member)
            heartbeat.remove(member)
        seen = members[0].beats
        await asyncio.sleep(0.03)
        assert members[0].beats == seen
        assert heartbeat._timer is None
        heartbeat.add(members[0])
        await until(lambda: members[0].beats > seen)
        heartbeat.remove(members[0])

    uvloop.run(run())


@pytest.mark.parametrize(("keep", "stall", "expected"), [(15, 30, 1.0), (0, 30, 1.0), (0, 2, 0.5), (0.2, 30, 0.05)])
def test_the_interval_follows_the_shorter_limit(keep: float, stall: float, expected: float) -> None:
    assert Heartbeat(keep_alive_s=keep, stall_timeout_s=stall).interval_s == pytest.approx(expected)

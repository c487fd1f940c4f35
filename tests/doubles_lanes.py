"""A client that does random things on 32 lanes of one socket and checks whatever comes back against what it asked."""

import asyncio
import json
import random
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from doubles_socket import TERMINAL, check_event
from websockets.asyncio.client import ClientConnection

MAX_IN_FLIGHT = 16
MAX_ASKED = 60  # a connection lets 64 wait
ENDLESS = "count"  # what the device obeys until it is stopped
STEER_CODES = {"response_not_active", "response_already_completed", "response_not_found", "too_many_pending_steers"}
TOOLS = [{"type": "function", "name": "f"}]
CALL_START, CALL_END = '<tool_call>{"name": "f", "arguments": ', "}</tool_call>"


@dataclass
class Asked:
    """One create: what it asks to hear, and whether it continues something that may be gone when its turn comes."""

    text: str | None  # None: an endless text
    may_fail: bool


@dataclass
class Answer:
    """One response as far as it has come."""

    response_id: str
    expected: str | None
    next_number: int = 0
    text: str = ""
    has_ended: bool = False
    is_cancelled: bool = False
    sent: deque[str] = field(default_factory=deque)  # steers without an answer
    accepted: dict[str, str] = field(default_factory=dict)  # steers without a successor
    parked: dict[str, str] = field(default_factory=dict)  # those that wait for the results of its calls
    arguments: str = ""  # of its call

    def check_text(self) -> None:
        assert self.expected is None or self.expected.startswith(self.text), "the text of another lane or turn"

    def check_whole(self) -> None:
        assert self.expected is not None
        called = CALL_START + self.arguments + CALL_END if self.arguments else ""
        assert self.text + called == self.expected


@dataclass
class LaneView:
    """What the client knows of a lane."""

    asked: deque[Asked] = field(default_factory=deque)
    answers: dict[str, Answer] = field(default_factory=dict)
    last: Answer | None = None

    @property
    def running(self) -> Answer | None:
        return None if self.last is None or self.last.has_ended else self.last

    @property
    def is_settled(self) -> bool:
        waits = any(answer.sent or answer.accepted for answer in self.answers.values())
        return not self.asked and self.running is None and not waits


class RandomClient:
    """Sends ``num_messages`` messages; every event has to fit."""

    def __init__(self, socket: ClientConnection, name: str, dice: random.Random, num_messages: int) -> None:
        self.lanes: dict[str | None, LaneView] = {f"lane-{place}": LaneView() for place in range(32)} | {
            None: LaneView()
        }
        self.max_in_flight = 0
        self.num_steered = self.num_cancelled = self.num_parked = 0
        self._socket = socket
        self._name = name
        self._dice = dice
        self._num_messages = num_messages
        self._num_errors_due = 0  # answers to nonsense, which name no lane
        self._num_texts = 0
        self._changed = asyncio.Event()

    async def run(self) -> None:
        """Send everything, and wait until everything has been answered."""
        async with asyncio.TaskGroup() as tasks:
            reading = tasks.create_task(self.read())
            await self.send()
            while self._num_errors_due or not all(lane.is_settled for lane in self.lanes.values()):
                self._changed.clear()
                await self._changed.wait()
                await self._cancel_endless()
            reading.cancel()

    async def send(self) -> None:
        for _ in range(self._num_messages):
            kind = self._dice.choices((self._create, self._steer, self._cancel, self._nonsense), (6, 4, 2, 1))[0]
            message = kind(self._dice.choice(list(self.lanes)))
            if message is not None:
                await self._socket.send(message if isinstance(message, str) else json.dumps(message))
            if self._dice.random() < 0.5:
                await asyncio.sleep(self._dice.random() * 0.004)

    async def read(self) -> None:
        async for text in self._socket:
            event = check_event(json.loads(text))
            self._take(event)
            self._changed.set()

    async def _cancel_endless(self) -> None:
        for stream_id, lane in self.lanes.items():
            if lane.running is not None and lane.running.expected is None and not lane.running.is_cancelled:
                lane.running.is_cancelled = True
                await self._socket.send(json.dumps(self._cancel(stream_id)))

    def _new_text(self) -> str:
        self._num_texts += 1
        return f"{self._name}.{self._num_texts}." * self._dice.randrange(1, 8)

    def _create(self, stream_id: str | None) -> dict[str, Any] | None:
        lane, dice = self.lanes[stream_id], self._dice
        if sum(len(one.asked) for one in self.lanes.values()) >= MAX_ASKED:
            return None
        text = self._new_text() if dice.random() < 0.8 else None
        if text is not None and dice.random() < 0.5:
            text = f'{CALL_START}{{"a": "{text}"}}{CALL_END}'
        fields: dict[str, Any] = {"store": dice.random() < 0.5, "resumable": dice.random() < 0.2, "tools": TOOLS}
        source = lane if dice.random() < 0.7 else self.lanes[dice.choice(list(self.lanes))]
        if source.last is not None and dice.random() < 0.4:
            fields["previous_response_id"] = source.last.response_id
        if stream_id is not None:
            fields["stream_id"] = stream_id
        lane.asked.append(Asked(text, "previous_response_id" in fields))
        return {"type": "response.create", "input": ENDLESS if text is None else f"say {text}", **fields}

    def _steer(self, _: str | None) -> dict[str, Any] | None:
        running = [lane.running or lane.last for lane in self.lanes.values() if lane.last is not None]
        if not running:
            return None
        answer, text = self._dice.choice(running), self._new_text()
        assert answer is not None
        answer.sent.append(text)
        return {"type": "response.steer", "previous_response_id": answer.response_id, "input": f"say {text}"}

    def _cancel(self, stream_id: str | None) -> dict[str, Any]:
        return {"type": "response.cancel"} | ({} if stream_id is None else {"stream_id": stream_id})

    def _nonsense(self, _: str | None) -> dict[str, Any] | str:
        self._num_errors_due += 1
        return self._dice.choice(["{", "[]", {"type": "no.such"}, {"type": "response.create", "stream_id": "a b"}])

    def _take(self, event: dict[str, Any]) -> None:
        stream_id, kind = event.get("stream_id"), event["type"]
        if kind == "error" and stream_id is None and event["error"]["code"] != "previous_response_not_found":
            self._num_errors_due -= 1
            assert self._num_errors_due >= 0, event
            return
        lane = self.lanes[stream_id]
        if kind == "error":
            assert event["error"]["code"] == "previous_response_not_found", event
            assert lane.asked.popleft().may_fail
        elif kind.startswith("response.steer."):
            self._take_steer(lane, event)
        elif kind == "response.created":
            self._begin(lane, event)
        else:
            self._go_on(lane, event)

    def _begin(self, lane: LaneView, event: dict[str, Any]) -> None:
        """A response begins when the one before has ended: a successor where one is due, else the next create."""
        assert lane.running is None, "two responses overlap in a lane"
        response = event["response"]
        if lane.last is not None and lane.last.accepted:
            assert response["previous_response_id"] == lane.last.response_id
            expected: str | None = list(lane.last.accepted.values())[-1]
            lane.last.accepted.clear()
            self.num_steered += 1
        else:
            expected = lane.asked.popleft().text
            if lane.last is not None and lane.last.response_id == response["previous_response_id"]:
                lane.last.parked.clear()
        lane.last = lane.answers[response["id"]] = Answer(response["id"], expected)
        self._count(lane.last, event)
        in_flight = sum(one.running is not None for one in self.lanes.values())
        self.max_in_flight = max(self.max_in_flight, in_flight)
        assert in_flight <= MAX_IN_FLIGHT

    def _go_on(self, lane: LaneView, event: dict[str, Any]) -> None:
        answer = lane.running
        assert answer is not None, "an event of no response"
        self._count(answer, event)
        if event["type"] == "response.output_text.delta":
            answer.text += event["delta"]
            answer.check_text()
        elif event["type"] == "response.function_call_arguments.delta":
            answer.arguments += event["delta"]
        elif event["type"] in TERMINAL:
            answer.has_ended = True
            response = event["response"]
            assert response["id"] == answer.response_id
            if response["status"] == "completed":
                answer.check_whole()
            elif response["status"] == "cancelled":
                self.num_cancelled += 1
            else:
                assert response["incomplete_details"] == {"reason": "steered"}
                assert answer.accepted

    def _take_steer(self, lane: LaneView, event: dict[str, Any]) -> None:
        answer = lane.answers.get(event["steer"]["previous_response_id"])
        if answer is None:  # forgotten: it names no lane
            named = (one.answers.get(event["steer"]["previous_response_id"]) for one in self.lanes.values())
            answer = next(one for one in named if one is not None)
            assert event["error"]["code"] == "response_not_found"
        steer_id = event["steer"].get("id")
        if event["type"] == "response.steer.accepted":
            answer.accepted[steer_id] = answer.sent.popleft()
        elif event["type"] == "response.steer.pending":
            assert answer.arguments, "it called nothing"
            answer.parked[steer_id] = answer.accepted.pop(steer_id)
            self.num_parked += 1
        else:
            self._take_failure(answer, event, steer_id)
        if event.get("error", {}).get("code") != "response_not_found":
            self._count(answer, event)

    def _take_failure(self, answer: Answer, event: dict[str, Any], steer_id: str | None) -> None:
        codes = STEER_CODES
        if steer_id is None:
            text = answer.sent.popleft()
        elif steer_id in answer.parked:  # the lane has gone on otherwise
            text, codes = answer.parked.pop(steer_id), {"successor_creation_failed"}
        else:
            text = answer.accepted.pop(steer_id)
        assert event["steer"]["input"] == f"say {text}"
        assert event["error"]["code"] in codes, event

    def _count(self, answer: Answer, event: dict[str, Any]) -> None:
        assert event["sequence_number"] == answer.next_number, "the numbers of a response have a gap"
        answer.next_number += 1

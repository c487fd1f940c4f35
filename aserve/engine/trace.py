"""A bounded record of everything that decides what the scheduler does, and its replay.

The record is a list of calls in their order: arrivals, aborts, plans and sampled tokens, each one line of JSON. It is
cut into segments. A segment starts with what the scheduler was at that moment: new, or a plain-data picture
(``snapshot.py``), so a file can be replayed exactly from its first line. A new segment starts when the engine is idle
and the current one has ``max_steps`` steps; under unbroken load it starts anyway after ``FORCED_FACTOR`` times as many.
The last two segments are kept.
"""

import logging
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from aserve.engine import snapshot
from aserve.errors import ClientError
from aserve.request import FinishReason, Request, SamplingParams, TokenLogprobs
from aserve.scheduler.limits import Limits
from aserve.scheduler.plan import StepPlan, StepTokens
from aserve.scheduler.scheduler import Scheduler

logger = logging.getLogger(__name__)

FORMAT = "aserve-trace-1"
FORCED_FACTOR = 16
OPTIONS = orjson.OPT_NON_STR_KEYS


def encode(value: object) -> bytes:
    """Encode one event; dataclasses become objects."""
    return orjson.dumps(value, option=OPTIONS)


class TraceRing:
    """Records calls as encoded lines; nothing that is recorded is referenced afterwards."""

    def __init__(self, scheduler: Scheduler, settings: dict[str, Any], max_steps: int) -> None:
        """``settings`` are the arguments that made ``scheduler``, which is still new."""
        self._scheduler = scheduler
        self._settings = settings
        self._max_steps = max_steps
        self._segments: list[list[bytes]] = [[self._head(None)]]
        self._num_steps = 0  # in the newest segment

    def record_arrival(self, request: Request) -> None:
        """Record a request that was offered to the scheduler, before it answered."""
        self._append({"add": request})

    def record_abort(self, request_id: str, reason: FinishReason) -> None:
        """Record an abort."""
        self._append({"abort": request_id, "reason": reason})

    def record_plan(self, plan: StepPlan | None) -> None:
        """Record what ``schedule`` answered."""
        self._append({"plan": plan})

    def record_tokens(self, tokens: StepTokens) -> None:
        """Record what a step sampled, before it is committed."""
        self._append({"tokens": tokens})
        self._num_steps += 1

    def record_failure(self, error: BaseException) -> None:
        """Record what ended the engine; nothing is recorded after it."""
        self._append({"failure": repr(error)})

    def rotate(self, is_idle: bool) -> None:
        """Start a new segment if the newest is long enough; call it between steps."""
        if self._num_steps >= (self._max_steps if is_idle else self._max_steps * FORCED_FACTOR):
            self._segments = [self._segments[-1], [self._head(snapshot.take(self._scheduler))]]
            self._num_steps = 0

    def lines(self) -> list[bytes]:
        """Return the kept lines, starting with a head."""
        return [line for segment in self._segments for line in segment]

    def dump(self, path: Path) -> None:
        """Write the kept lines to ``path``, all or nothing."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=path.name, delete=False) as file:
            file.writelines(line + b"\n" for line in self.lines())
        os.replace(file.name, path)

    def _append(self, event: dict[str, Any]) -> None:
        self._segments[-1].append(encode(event))

    def _head(self, picture: list[Any] | None) -> bytes:
        return encode({"format": FORMAT, "settings": self._settings, "scheduler": picture})


@dataclass(frozen=True, slots=True)
class ReplayReport:
    """What a replay found; ``difference`` is None if every plan came out as recorded."""

    num_steps: int
    num_requests: int
    num_aborts: int
    difference: str | None = None

    @property
    def is_equal(self) -> bool:
        """True if the scheduler decided the same, step by step."""
        return self.difference is None

    def __str__(self) -> str:
        counts = f"{self.num_steps} steps, {self.num_requests} requests, {self.num_aborts} aborts"
        return f"{counts}: " + ("every plan is the recorded one" if self.is_equal else f"{self.difference}")


def replay_file(path: str | Path) -> ReplayReport:
    """Feed the recorded calls to a scheduler and compare its plans; stops at the first difference.

    Raises ClientError if the file cannot be read or is not a trace.
    """
    try:
        lines = Path(path).read_bytes().splitlines()
    except OSError as error:
        raise ClientError(f"cannot read {path}: {error.strerror}") from error
    try:
        return _Replay().run(lines)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ClientError(f"{path} is not a trace that this version can replay: {error!r}") from error


class _Replay:
    """One pass over the lines of a file."""

    def __init__(self) -> None:
        self.num_steps = self.num_requests = self.num_aborts = 0
        self._scheduler: Scheduler | None = None

    def run(self, lines: list[bytes]) -> ReplayReport:
        if not lines or orjson.loads(lines[0]).get("format") != FORMAT:
            raise ValueError(f"the first line does not say {FORMAT}")
        difference = next(filter(None, map(self._apply, map(orjson.loads, lines))), None)
        return ReplayReport(self.num_steps, self.num_requests, self.num_aborts, difference)

    def _apply(self, event: dict[str, Any]) -> str | None:
        """Do what one line says; returns a description if the answer is not the recorded one."""
        if "settings" in event:
            if self._scheduler is None:  # a later head only lets older segments go
                self._scheduler = _restored(event)
            return None
        if self._scheduler is None:
            raise ValueError("the first line holds no settings")
        call = self._call(self._scheduler, event)
        try:
            return call()
        except Exception as error:  # whatever it is, the recorded run may have ended by it
            return f"step {self.num_steps}: the scheduler raises {error!r}"

    def _call(self, scheduler: Scheduler, event: dict[str, Any]) -> Callable[[], str | None]:
        """Return the call that one line stands for, its arguments already read."""
        if "plan" in event:
            return lambda: self._compare(scheduler.schedule(), event["plan"])
        if "failure" in event:
            return lambda: self._ignore(scheduler.schedule())  # perhaps this is what failed
        if "tokens" in event:
            self.num_steps += 1
            tokens = _tokens(event["tokens"])
            return lambda: self._ignore(scheduler.commit(tokens))
        if "add" in event:
            self.num_requests += 1
            request = _request(event["add"])
            return lambda: self._ignore(scheduler.add(request))  # type: ignore[func-returns-value]
        self.num_aborts += 1
        request_id, reason = event["abort"], FinishReason(event["reason"])
        return lambda: self._ignore(scheduler.abort(request_id, reason))

    @staticmethod
    def _ignore(answer: object) -> None:
        """Only plans are compared: deltas follow from tokens."""

    def _compare(self, plan: StepPlan | None, recorded: dict[str, Any] | None) -> str | None:
        planned = orjson.loads(encode(plan))
        if planned == recorded:
            return None
        if planned is None or recorded is None:
            return f"step {self.num_steps}: planned {planned}, recorded {recorded}"
        names = [name for name in recorded if planned.get(name) != recorded[name]]
        details = "; ".join(f"{name} is {planned.get(name)}, recorded {recorded[name]}" for name in names)
        return f"step {recorded['step_id']}: {details}"


def _restored(head: dict[str, Any]) -> Scheduler:
    if head["scheduler"] is not None:
        restored = snapshot.restore(head["scheduler"])
        if not isinstance(restored, Scheduler):
            raise ValueError("the picture holds no scheduler")
        return restored
    return make_scheduler(head["settings"])


def make_scheduler(settings: dict[str, Any]) -> Scheduler:
    """Build a scheduler from recorded settings ; requests must come with a seed."""
    arguments = dict(settings)
    limits = Limits(**arguments.pop("limits"))
    eos_token_ids = frozenset[int](arguments.pop("eos_token_ids"))
    return Scheduler(limits, eos_token_ids=eos_token_ids, fresh_seed=refuse_seed, **arguments)


def refuse_seed() -> int:
    """Stand in for fresh entropy, which no replay could find again."""
    raise RuntimeError("a request must have its seed before it reaches the scheduler")


def _request(fields: dict[str, Any]) -> Request:
    params = dict(fields["params"])
    params["logit_bias"] = {int(token): bias for token, bias in params["logit_bias"].items()}
    params["stop"] = tuple(params["stop"])
    params["stop_token_ids"] = tuple(params["stop_token_ids"])
    return Request(
        **fields | {"prompt_token_ids": tuple(fields["prompt_token_ids"]), "params": SamplingParams(**params)}
    )


def _tokens(fields: dict[str, Any]) -> StepTokens:
    tokens = StepTokens(**fields)
    tokens.errors = {int(place): message for place, message in fields["errors"].items()}
    if fields["logprobs"] is not None:
        tokens.logprobs = [row and TokenLogprobs(**row) for row in fields["logprobs"]]
    if fields["prompt_logprobs"] is not None:
        tokens.prompt_logprobs = {
            int(place): [TokenLogprobs(**row) for row in rows] for place, rows in fields["prompt_logprobs"].items()
        }
    return tokens

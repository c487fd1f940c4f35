"""Feeds a recorded run to a scheduler and compares what it decides."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from aserve.engine import snapshot
from aserve.engine.trace import FORMAT, encode, make_scheduler, plan_facts
from aserve.errors import ClientError
from aserve.request import FinishReason, GrammarSpec, Request, SamplingParams
from aserve.scheduler.plan import StepPlan, StepTokens
from aserve.scheduler.scheduler import Scheduler


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
        self._newest_prompt: tuple[int, ...] = ()
        self._scheduler: Scheduler | None = None

    def run(self, lines: list[bytes]) -> ReplayReport:
        head = orjson.loads(lines[0]) if lines else {}
        if head.get("format") != FORMAT or "settings" not in head:
            raise ValueError(f"the first line is no head of {FORMAT}")
        difference = next(filter(None, map(self._apply, map(orjson.loads, lines))), None)
        if self._scheduler is None:
            raise ClientError(
                "the trace starts in the middle of a run: the scheduler held too much for a picture, and what was "
                "recorded before is dropped; the file can be read, but not replayed"
            )
        return ReplayReport(self.num_steps, self.num_requests, self.num_aborts, difference)

    def _apply(self, event: dict[str, Any]) -> str | None:
        """Do what one line says; returns a description if the answer is not the recorded one."""
        if "settings" in event:
            if self._scheduler is None and event["has_start"]:  # a later head only lets older segments go
                self._scheduler = _restored(event)
            return None
        if self._scheduler is None:  # what came before is not known
            return None
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
            request = self._request(event["add"])
            return lambda: self._ignore(scheduler.add(request))  # type: ignore[func-returns-value]
        if "end_lease" in event:
            return lambda: self._ignore(scheduler.end_lease(event["end_lease"]))  # type: ignore[func-returns-value]
        self.num_aborts += 1
        request_id, reason = event["abort"], FinishReason(event["reason"])
        return lambda: self._ignore(scheduler.abort(request_id, reason))

    def _request(self, fields: dict[str, Any]) -> Request:
        params = dict(fields["params"])
        params["logit_bias"] = {int(token): bias for token, bias in params["logit_bias"].items()}
        params["stop"] = tuple(params["stop"])
        params["stop_token_ids"] = tuple(params["stop_token_ids"])
        params["kept_special_ids"] = tuple(params.get("kept_special_ids", ()))
        if params.get("grammar") is not None:
            params["grammar"] = GrammarSpec(**params["grammar"])
        self._newest_prompt = tuple(fields["prompt_token_ids"]) or self._newest_prompt
        return Request(**fields | {"prompt_token_ids": self._newest_prompt, "params": SamplingParams(**params)})

    @staticmethod
    def _ignore(answer: object) -> None:
        """Only plans are compared: deltas follow from tokens."""

    def _compare(self, plan: StepPlan | None, recorded: dict[str, Any] | None) -> str | None:
        planned = orjson.loads(encode(plan_facts(plan)))
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


def _tokens(fields: list[Any]) -> StepTokens:
    step_id, token_ids, errors, *ended = fields
    messages = {int(place): message for place, message in errors.items()}
    return StepTokens(step_id, token_ids, errors=messages, ended=ended[0] if ended else [])

"""A bounded record of everything that decides what the scheduler does.

The record is a list of calls in their order: arrivals, aborts, plans and sampled tokens, each one line of JSON. What
follows from others is left out: log probabilities, which decide nothing, the tokens of a row start, and a prompt that
is the one of the arrival before.

The record is cut into segments. A segment starts with what the scheduler was at that moment: new, or a plain-data
picture (``snapshot.py``), so a file can be replayed exactly from its first line. A new segment starts when the engine
is idle and the current one has ``max_steps`` steps; under unbroken load it starts anyway after ``FORCED_FACTOR`` times
as many. The last two segments are kept.

A picture holds up the event loop in proportion to what the scheduler and its prefix tree hold, so none is taken of a
scheduler heavier than ``MAX_PICTURE_WEIGHT``; the segment then just grows, to be cut at the next chance. Once it has
``max_bytes / 2``, memory counts more than replay: a segment without a picture starts, and when the last one with a
picture is gone the record starts in the middle. It can still be read, but ``replay`` says that it has no beginning.
"""

import dataclasses
import logging
import os
import tempfile
import time
from collections.abc import Set
from pathlib import Path
from typing import Any

import orjson

from aserve.config import EngineConfig, cache_folder
from aserve.engine import snapshot
from aserve.request import FinishReason, Request
from aserve.scheduler.limits import Limits
from aserve.scheduler.ngram_drafter import NgramDrafter, NgramSettings
from aserve.scheduler.plan import StepPlan, StepTokens
from aserve.scheduler.scheduler import Scheduler

logger = logging.getLogger(__name__)

FORMAT = "aserve-trace-2"
FORCED_FACTOR = 16
MAX_BYTES = 32 * 2**20
MAX_PICTURE_WEIGHT = 100_000  # of the scheduler, in tokens; about 5 ms
OPTIONS = orjson.OPT_NON_STR_KEYS


def encode(value: object) -> bytes:
    """Encode one event; dataclasses become objects."""
    return orjson.dumps(value, option=OPTIONS)


def plan_facts(plan: StepPlan | None) -> dict[str, Any] | None:
    """Return what a plan decides, without the tokens and parameters that its row starts repeat from the arrivals."""
    if plan is None:
        return None
    facts = {field.name: getattr(plan, field.name) for field in dataclasses.fields(plan)}
    if not plan.drafts:
        del facts["drafts"]  # as before there were any
    facts["row_starts"] = [
        (start.row, start.request_id, start.prompt_len, len(start.token_ids), start.seed) for start in plan.row_starts
    ]
    return facts


class TraceRing:
    """Records calls as encoded lines; of what is recorded only the newest prompt is referenced afterwards."""

    def __init__(
        self, scheduler: Scheduler, settings: dict[str, Any], max_steps: int, max_bytes: int = MAX_BYTES
    ) -> None:
        """``settings`` are the arguments that made ``scheduler``, which is still new."""
        self._scheduler = scheduler
        self._settings = settings
        self._max_steps = max_steps
        self._max_bytes = max_bytes
        self._segments: list[list[bytes]] = []
        self._newest_prompt: tuple[int, ...] | None = None  # in the newest segment, as are the next two
        self._num_steps = 0
        self._num_bytes = 0
        self._due_idle = self._due_busy = 0  # steps after which a picture is worth a try
        self._start_segment(None, has_start=True)

    def record_arrival(self, request: Request) -> None:
        """Record a request that the scheduler has taken.

        The choices of one request share a prompt: an empty one, which is never taken, stands for the one before.
        """
        prompt = request.prompt_token_ids
        if prompt is self._newest_prompt:
            request = dataclasses.replace(request, prompt_token_ids=())
        self._newest_prompt = prompt
        self._append({"add": request})

    def record_abort(self, request_id: str, reason: FinishReason) -> None:
        """Record an abort."""
        self._append({"abort": request_id, "reason": reason})

    def record_lease_end(self, holder: str) -> None:
        """Record that a holder of pages is gone."""
        self._append({"end_lease": holder})

    def record_plan(self, plan: StepPlan | None) -> None:
        """Record what ``schedule`` answered."""
        self._append({"plan": plan_facts(plan)})

    def record_tokens(self, tokens: StepTokens) -> None:
        """Record what a step sampled, before it is committed."""
        self._append({"tokens": (tokens.step_id, tokens.token_ids, tokens.errors, tokens.ended)})
        self._num_steps += 1

    def record_failure(self, error: BaseException) -> None:
        """Record what ended the engine; nothing is recorded after it."""
        self._append({"failure": repr(error)})

    def rotate(self, is_idle: bool) -> None:
        """Start a new segment if the newest is long enough; call it between calls of the scheduler."""
        is_full = self._num_bytes >= self._max_bytes / 2
        if self._num_steps < (self._due_idle if is_idle else self._due_busy) and not is_full:
            return
        if self._scheduler.weight <= MAX_PICTURE_WEIGHT:
            self._start_segment(snapshot.take(self._scheduler), has_start=True)
        elif is_full:
            self._start_segment(None, has_start=False)
        else:
            self._due_idle = self._due_busy = self._num_steps + self._max_steps

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
        line = encode(event)
        self._segments[-1].append(line)
        self._num_bytes += len(line)

    def _start_segment(self, picture: list[Any] | None, *, has_start: bool) -> None:
        head = {"format": FORMAT, "settings": self._settings, "has_start": has_start, "scheduler": picture}
        self._segments = [*self._segments[-1:], []]
        self._newest_prompt = None
        self._num_steps = self._num_bytes = 0
        self._due_idle, self._due_busy = self._max_steps, self._max_steps * FORCED_FACTOR
        self._append(head)


def scheduler_settings(config: EngineConfig, limits: Limits, eos_token_ids: Set[int]) -> dict[str, Any]:
    """Return what ``make_scheduler`` takes, as plain data."""
    ngram = {"num_tokens": config.num_speculative_tokens, "min_len": config.ngram_min, "max_len": config.ngram_max}
    return {
        "limits": dataclasses.asdict(limits),
        "eos_token_ids": sorted(eos_token_ids),
        "prefix_cache": config.prefix_cache,
        "policy": config.policy,
        "max_queued_requests": config.max_queued_requests,
        "lease_fraction": config.kv_lease_fraction,
        "ngram": None if config.speculation == "none" else ngram,
    }


def make_scheduler(settings: dict[str, Any]) -> Scheduler:
    """Build a scheduler from recorded settings; requests must come with a seed."""
    arguments = dict(settings)
    limits = Limits(**arguments.pop("limits"))
    eos_token_ids = frozenset[int](arguments.pop("eos_token_ids"))
    ngram = arguments.pop("ngram", None)
    drafter = None if ngram is None else NgramDrafter(NgramSettings(**ngram))
    return Scheduler(limits, eos_token_ids=eos_token_ids, fresh_seed=refuse_seed, drafter=drafter, **arguments)


def refuse_seed() -> int:
    """Stand in for fresh entropy, which no replay could find again."""
    raise RuntimeError("a request must have its seed before it reaches the scheduler")


def default_trace_path(setting: str | None) -> Path:
    """Return where a trace goes: what is set, else a file of its own in the cache folder."""
    return Path(setting) if setting else cache_folder() / "traces" / time.strftime("trace-%Y%m%d-%H%M%S.jsonl")

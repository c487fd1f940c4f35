"""Doubles for tests of the engine: a tokenizer of letters, scripts, a sink, and a device that checks its memory."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from doubles_tuning import make_engine

from aserve.config import EngineConfig
from aserve.engine.async_engine import AsyncEngine
from aserve.errors import AserveError
from aserve.request import FinishReason, Request, RequestOutput, SamplingParams
from aserve.runner.scripted import Script, ScriptedRunner
from aserve.scheduler.limits import Limits
from aserve.scheduler.plan import StepPlan, StepTokens
from aserve.tokenizer.spans import Span, make_span, match_spans

EOS = 2
LIMITS = Limits(
    vocab_size=256, max_model_len=512, max_num_seqs=8, max_num_batched_tokens=64, num_pages=256, page_size=4
)


class LetterDetokenizer:
    """Each token below 256 is the character of that code; EOS is special."""

    def __init__(self, skip_special_tokens: bool) -> None:
        self._skip = skip_special_tokens

    def push(self, token_ids: Sequence[int]) -> str:
        return "".join("<eos>" if token == EOS else chr(token) for token in token_ids if token != EOS or not self._skip)

    def flush(self) -> str:
        return ""


class LetterTokenizer:
    """One character, one token; chat messages are joined by newlines."""

    vocab_size = 256
    bos_token_id = None
    eos_token_ids = frozenset({EOS})
    has_chat_template = True
    chat_template = ""
    special_token_ids = frozenset({EOS})

    def special_ids_of(self, texts: Sequence[str]) -> tuple[int, ...]:
        return (EOS,) if "<eos>" in texts else ()

    def min_tokens_for(self, num_chars: int) -> int:
        return num_chars

    def encode(self, text: str, add_special_tokens: bool = True, *, max_tokens: int | None = None) -> list[int]:
        return [ord(letter) for letter in text]

    def encode_fragment(self, text: str) -> list[int]:
        return self.encode(text)

    def encode_chat(
        self, messages: Sequence[dict[str, Any]], *, add_generation_prompt: bool = True, **options: Any
    ) -> list[int]:
        return self.encode("\n".join(message["content"] for message in messages) + "\n" * add_generation_prompt)

    def encode_turn(self, messages: Sequence[dict[str, Any]], known: Sequence[Span], **options: Any) -> list[Span]:
        text = "\n".join(message["content"] for message in messages) + "\n"
        spans, end = match_spans(text, known)
        return [*spans, make_span(text[end:], self.encode(text[end:]))]

    def written_span(self, text: str, token_ids: Sequence[int]) -> Span:
        shown = [token for token in token_ids if token != EOS]  # the template writes no ending
        return make_span(text, shown)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return self.detokenizer(skip_special_tokens).push(token_ids)

    def token_bytes(self, token_id: int) -> bytes:
        return b"<eos>" if token_id == EOS else chr(token_id).encode()

    def detokenizer(self, skip_special_tokens: bool) -> LetterDetokenizer:
        return LetterDetokenizer(skip_special_tokens)


def speak(text: str, prompt_len: int, then: int = EOS) -> Script:
    """Say ``text`` after a prompt of ``prompt_len`` tokens, one letter a step, and ``then`` for ever."""

    def script(tokens: Sequence[int], position: int) -> int:
        spoken = position - prompt_len
        return ord(text[spoken]) if spoken < len(text) else then

    return script


def letters(tokens: Sequence[int], position: int) -> int:
    """Continue for ever with letters that depend on the whole history, so a wrong or lost token shows."""
    return 97 + (sum(tokens[:position]) * 31 + position) % 26


def mixed(tokens: Sequence[int], position: int) -> int:
    """Like ``letters``, but with an EOS now and then."""
    token = letters(tokens, position)
    return EOS if token == 99 and position % 3 == 0 else token


@dataclass
class RecordingSink:
    """Keeps every call, and counts those that came after the end."""

    outputs: list[RequestOutput] = field(default_factory=list)
    error: AserveError | None = None
    num_late_calls: int = 0

    def put(self, output: RequestOutput) -> None:
        self.num_late_calls += self.is_ended
        self.outputs.append(output)

    def fail(self, error: AserveError) -> None:
        self.num_late_calls += self.is_ended
        self.error = error

    @property
    def is_ended(self) -> bool:
        return self.error is not None or self.finish_reason is not None

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.outputs[-1].finish_reason if self.outputs else None

    @property
    def text(self) -> str:
        return "".join(output.text for output in self.outputs)

    @property
    def token_ids(self) -> list[int]:
        return [token for output in self.outputs for token in output.token_ids]


class CheckedRunner(ScriptedRunner):
    """Keeps a value for every KV slot that depends on all tokens before it, and checks what each step reads.

    It also checks that no page is written by two rows of the steps on their way.
    """

    def __init__(self, limits: Limits, script: Script, *, step_time_s: float | None = 0.0) -> None:
        super().__init__(limits, script, step_time_s=step_time_s)
        self._slots: dict[tuple[int, int], int] = {}
        self._planned_tables: list[dict[int, int]] = [{} for _ in range(limits.max_num_seqs)]
        self._writers: list[tuple[int, dict[int, int]]] = []  # (launch, page -> start that writes it)
        self._starts_seen = 0
        self._start_of_row = [0] * limits.max_num_seqs

    def launch(self, plan: StepPlan) -> "Future[StepTokens]":
        for start in plan.row_starts:
            self._starts_seen += 1
            self._start_of_row[start.row] = self._starts_seen
            self._planned_tables[start.row] = {}
        for row, place, page in plan.page_updates:
            assert 0 <= page < self.limits.num_pages, "the dummy page was handed out"
            self._planned_tables[row][place] = page
        pending = {launch.number for launch in tuple(self.launched)}
        self._writers = [(number, pages) for number, pages in self._writers if number in pending]
        written: dict[int, int] = {}
        for row, computed, count in zip(plan.rows, plan.num_computed, plan.num_scheduled, strict=True):
            for position in range(computed, computed + count):
                page = self._planned_tables[row][position // self.limits.page_size]
                for pages in (written, *(pages for _, pages in self._writers)):
                    owner = pages.get(page, self._start_of_row[row])
                    assert owner == self._start_of_row[row], f"page {page} is written for two owners"
                written[page] = self._start_of_row[row]
        self._writers.append((self.num_launched, written))
        return super().launch(plan)

    def execute(self, plan: StepPlan) -> StepTokens:
        tokens = super().execute(plan)
        for place, row in enumerate(plan.rows):
            computed = plan.num_computed[place]
            self._read_and_write(row, computed, computed + plan.num_scheduled[place])
        return tokens

    def _read_and_write(self, row: int, computed: int, end: int) -> None:
        value = 0
        for position in range(len(self.token_pool[row]) - 1, end):  # keys of drafts that were wrong
            self._slots[self.page_table[row][position // self.limits.page_size], position % self.limits.page_size] = -1
        end = min(end, len(self.token_pool[row]) - 1)
        for position, token in enumerate(self.token_pool[row][:end]):
            value = hash((value, token))
            slot = (self.page_table[row][position // self.limits.page_size], position % self.limits.page_size)
            if position >= computed:
                self._slots[slot] = value
            elif self._slots.get(slot) != value:
                raise AssertionError(f"row {row} reads another sequence's KV at position {position}")


def request(request_id: str, prompt: str | Sequence[int], **params: Any) -> Request:
    token_ids = tuple(map(ord, prompt)) if isinstance(prompt, str) else tuple(prompt)
    return Request(request_id=request_id, prompt_token_ids=token_ids, params=SamplingParams(**params))


@asynccontextmanager
async def running_engine(runner: ScriptedRunner, tokenizer: Any = None, **settings: Any) -> AsyncIterator[AsyncEngine]:
    """Start an engine on ``runner``; at the end check that nothing is held, and that no task is left."""
    before = asyncio.all_tasks()
    engine = make_engine(EngineConfig(**settings), runner=runner, tokenizer=tokenizer or LetterTokenizer())
    async with engine:
        yield engine
        assert engine._steps is not None
        if engine.failure is None and not engine.stats().scheduler.num_in_flight:
            engine._steps.scheduler.check_integrity()
    assert asyncio.all_tasks() == before


async def until(is_true: Callable[[], bool], timeout_s: float = 10.0) -> None:
    """Let the loop and the device's thread run until ``is_true``."""
    deadline = time.monotonic() + timeout_s
    for _ in iter(is_true, True):
        assert time.monotonic() < deadline, "waited in vain"
        await asyncio.sleep(0.001)


async def settle(turns: int = 20) -> None:
    """Let the loop run until everything that can happen without the device has happened."""
    for _ in range(turns):
        await asyncio.sleep(0)

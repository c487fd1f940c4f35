"""``python -m aserve.bench.speculation``: tokens per second with drafts by prompt lookup and without, in turn.

Greedy chats until the model ends them: some ask for a text again, with or without a change, and some for a text that
stands nowhere yet. Both engines live in this process; one idles while the other is timed. The prefix cache is off, so
that each round computes the same.
"""

import argparse
import asyncio
import itertools
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from aserve.bench.report import format_table
from aserve.config import EngineConfig
from aserve.engine.async_engine import AsyncEngine
from aserve.request import SamplingParams

PARAGRAPHS = (
    "The river rises in the hills north of the town and runs past three mills before it meets the sea. In spring the "
    "water is high and the mills work day and night. In summer the water is low and the mills stand still for weeks.",
    "def total(prices):\n    result = 0\n    for price in prices:\n        result = result + price\n    return result\n"
    "\n\n"
    "def mean(prices):\n    result = total(prices)\n    return result / len(prices)",
    "Monday: bread, milk, eggs and two apples. Tuesday: bread, milk, cheese and two pears. Wednesday: bread, milk, "
    "butter and two plums. Thursday: bread, milk, honey and two lemons. Friday: bread, milk, jam and two melons.",
    '[{"name": "Anna", "age": 31, "city": "Bern"}, {"name": "Boris", "age": 45, "city": "Graz"}, '
    '{"name": "Clara", "age": 27, "city": "Linz"}, {"name": "David", "age": 52, "city": "Metz"}]',
)
PROMPTS = {
    "copy": [f"Repeat this text word for word, and write nothing else:\n\n{text}" for text in PARAGRAPHS],
    "new": [
        "Tell a short story about a lighthouse.",
        "Why is the sky blue? Explain it to a child.",
        "Describe a market in the morning.",
        "Give me advice for a first day at work.",
    ],
}


@dataclass(frozen=True, slots=True)
class Answers:
    """What one engine made of some prompts at once."""

    token_ids: list[list[int]]
    seconds: float
    cpu_s: float  # of this process, whose other engine idles: what a busy machine does not change
    num_steps: int

    @property
    def tokens_per_s(self) -> float:
        """Output tokens per second of wall time, prefill included."""
        return sum(map(len, self.token_ids)) / self.seconds


async def answer(engine: AsyncEngine, prompts: Sequence[str], max_tokens: int) -> Answers:
    """Answer all ``prompts`` at once."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    started_s, started_cpu_s, first_step = time.perf_counter(), time.process_time(), engine.metrics.num_steps
    chats = ([{"role": "user", "content": prompt}] for prompt in prompts)
    outputs = await asyncio.gather(*(engine.complete(chat, params) for chat in chats))
    return Answers(
        [output.token_ids for output in outputs],
        seconds=time.perf_counter() - started_s,
        cpu_s=time.process_time() - started_cpu_s,
        num_steps=engine.metrics.num_steps - first_step,
    )


async def compare(engines: Sequence[AsyncEngine], kind: str, streams: int, arguments: argparse.Namespace) -> Any:
    """Return one row of the table: medians over the rounds; ``engines`` are that without drafts and that with."""
    prompts = list(itertools.islice(itertools.cycle(PROMPTS[kind]), streams))
    drafting = engines[1]
    before = drafting.stats().scheduler
    rounds = [
        [await answer(engine, prompts, arguments.max_tokens) for engine in engines] for _ in range(arguments.rounds)
    ]
    after = drafting.stats().scheduler
    num_drafts = after.num_draft_tokens - before.num_draft_tokens
    return {
        "text": kind,
        "streams": streams,
        "without tok/s": statistics.median(plain.tokens_per_s for plain, _ in rounds),
        "with tok/s": statistics.median(drafted.tokens_per_s for _, drafted in rounds),
        "steps without": statistics.median(plain.num_steps for plain, _ in rounds),
        "steps with": statistics.median(drafted.num_steps for _, drafted in rounds),
        "ratio of tok/s": statistics.median(drafted.tokens_per_s / plain.tokens_per_s for plain, drafted in rounds),
        "ratio of CPU time": statistics.median(plain.cpu_s / drafted.cpu_s for plain, drafted in rounds),
        "drafts": num_drafts / arguments.rounds,
        "accepted": (after.num_accepted_tokens - before.num_accepted_tokens) / max(1, num_drafts),
        "same tokens": all(plain.token_ids == drafted.token_ids for plain, drafted in rounds),
    }


async def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a row for each kind of text and number of streams."""
    base: dict[str, Any] = {"model": arguments.model, "num_threads": arguments.threads, "prefix_cache": False}
    lookup = {name: getattr(arguments, name) for name in ("num_speculative_tokens", "ngram_max", "ngram_min")}
    plain = AsyncEngine(EngineConfig(**base))
    drafted = AsyncEngine(EngineConfig(**base, **lookup, speculation="ngram"))
    async with plain, drafted:
        for engine in (plain, drafted):
            await answer(engine, PROMPTS["new"][:1], 8)
        pairs = itertools.product(PROMPTS, arguments.streams)
        return [await compare((plain, drafted), kind, streams, arguments) for kind, streams in pairs]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m aserve.bench.speculation", description=__doc__)
    parser.add_argument("model", nargs="?", help="as for aserve serve (default: the demo model)")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4], metavar="N", help="prompts at once")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="of both engines in turn (default: 3)")
    parser.add_argument("--max-tokens", type=int, default=160, metavar="N", help="of an answer (default: 160)")
    parser.add_argument("--threads", type=int, metavar="N", help="compute threads on a CPU")
    defaults = EngineConfig()
    for name in ("num_speculative_tokens", "ngram_max", "ngram_min"):
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, type=int, default=getattr(defaults, name), metavar="N", help="as for aserve serve")
    print(format_table(asyncio.run(measure(parser.parse_args(argv)))))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

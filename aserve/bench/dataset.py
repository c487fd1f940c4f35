"""The requests of a load: random ones of known lengths, or conversations from a file."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from aserve.bench.clients import LoadClient, LoadRequest
from aserve.bench.workload import LengthRange, WorkloadShape, random_workload
from aserve.errors import AserveError, ClientError

WORDS = ("times", "folks", "water", "light", "house", "world", "music", "stone", "green", "small", "river", "night")
CALIBRATION_WORDS = (10, 60)
CHARS_PER_TOKEN = 4  # of English, about; says how long an answer in a file is
MAX_ANSWER_TOKENS = 1024
VOCABULARY = 1 << 30  # larger than what random ids reach


@dataclass(frozen=True, slots=True)
class TextScale:
    """How many tokens the server makes of ``random_text``: ``fixed`` for its template, then so many for each word."""

    fixed: float = 0.0
    per_word: float = 1.0

    def words_for(self, num_tokens: int) -> int:
        """Return how many words come closest to ``num_tokens``."""
        return max(1, round((num_tokens - self.fixed) / self.per_word))


def random_text(num_words: int, rng: random.Random) -> str:
    """Return words of the same length, the first a number, so that no two texts share a beginning."""
    return " ".join([f"{rng.randrange(10**6):06d}", *(rng.choice(WORDS) for _ in range(num_words - 1))])


async def measure_scale(client: LoadClient, variant: int) -> TextScale:
    """Send two texts and read from the answers' usage how many tokens they were; raises AserveError if one fails."""
    rng = random.Random(f"scale {variant}")
    counts = []
    for num_words in CALIBRATION_WORDS:
        timing = await client.complete(LoadRequest(random_text(num_words, rng), 1))
        if timing.error is not None:
            raise AserveError(f"the server does not answer the first request: {timing.error}")
        counts.append(timing.num_prompt_tokens)
    low, high = CALIBRATION_WORDS
    per_word = (counts[1] - counts[0]) / (high - low)
    return TextScale(counts[0] - low * per_word, per_word) if per_word > 0 else TextScale()


def random_requests(shape: WorkloadShape, scale: TextScale | None, variant: int = 0) -> list[LoadRequest]:
    """Draw the requests of ``shape``: texts of about those lengths, or token ids if there is no ``scale``.

    Variants have the same lengths and nothing else in common.
    """
    items = random_workload(shape, VOCABULARY, variant)
    if scale is None:
        return [LoadRequest(item.prompt_token_ids, item.output_len) for item in items]
    rng = random.Random(f"text {shape.seed} {variant}")
    return [
        LoadRequest(random_text(scale.words_for(len(item.prompt_token_ids)), rng), item.output_len) for item in items
    ]


def conversation_requests(file: str, num_prompts: int, output_lens: LengthRange | None, seed: int) -> list[LoadRequest]:
    """Draw conversations from a file in ShareGPT's format: a list of ``{"conversations": [{"from", "value"}, ...]}``.

    The prompt is the first human turn. ``output_lens`` None takes the length of the answer that the file has, at four
    characters a token. Raises ClientError for a file that cannot be used or has too few conversations.
    """
    rng = random.Random(seed)
    pairs = [(prompt, answer) for prompt, answer in map(_first_exchange, _read_list(file)) if prompt]
    if len(pairs) < num_prompts:
        raise ClientError(f"{file} has {len(pairs)} conversations that begin with a human turn, not {num_prompts}")
    chosen = rng.sample(pairs, num_prompts)
    return [
        LoadRequest(prompt, _answer_len(answer) if output_lens is None else output_lens.draw(rng))
        for prompt, answer in chosen
    ]


def _read_list(file: str) -> list[Any]:
    try:
        content = orjson.loads(Path(file).read_bytes())
    except OSError as error:
        raise ClientError(f"cannot read {file}: {error.strerror}") from error
    except orjson.JSONDecodeError as error:
        raise ClientError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(content, list):
        raise ClientError(f"{file} does not hold a list of conversations")
    return content


def _first_exchange(entry: Any) -> tuple[str, str]:
    """Return the first human turn and what follows it; empty where there is none."""
    turns = entry.get("conversations") if isinstance(entry, dict) else None
    said = list(_turns(turns)) if isinstance(turns, list) else []
    if not said or said[0][0] not in ("human", "user"):
        return "", ""
    return said[0][1], said[1][1] if len(said) > 1 else ""


def _turns(turns: list[Any]) -> Iterator[tuple[str, str]]:
    for turn in turns:
        if isinstance(turn, dict) and isinstance(turn.get("value"), str) and turn.get("from") != "system":
            yield str(turn.get("from")), turn["value"]


def _answer_len(answer: str) -> int:
    return max(1, min(MAX_ANSWER_TOKENS, len(answer) // CHARS_PER_TOKEN))

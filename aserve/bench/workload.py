"""Random prompts of known lengths, the same for the same seed."""

import random
import re
from dataclasses import dataclass

LENGTHS = re.compile(r"(?P<low>\d{1,9})(?::(?P<high>\d{1,9}))?", re.ASCII)
HIGHEST_ID = 10_000  # of a random prompt's tokens: every real vocabulary is larger


@dataclass(frozen=True, slots=True)
class LengthRange:
    """Numbers of tokens, all equally likely, both ends included."""

    low: int
    high: int

    @classmethod
    def parse(cls, text: str) -> "LengthRange":
        """Read "128" or "100:1024"; raises ValueError for anything else."""
        match = LENGTHS.fullmatch(text)
        low, high = (int(match["low"]), int(match["high"] or match["low"])) if match else (0, 0)
        if not 0 < low <= high:
            raise ValueError(f"{text!r} is neither a number of tokens nor LOW:HIGH")
        return cls(low, high)

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low}:{self.high}"

    def draw(self, rng: random.Random) -> int:
        """Return one length."""
        return rng.randint(self.low, self.high)


@dataclass(frozen=True, slots=True)
class WorkloadShape:
    """How many requests of which size; ``seed`` decides lengths and ids."""

    num_prompts: int
    input_lens: LengthRange
    output_lens: LengthRange
    seed: int = 0


WORKLOADS = {
    "even": WorkloadShape(32, LengthRange(128, 128), LengthRange(128, 128)),
    "mixed256": WorkloadShape(256, LengthRange(100, 1024), LengthRange(100, 1024)),
    "single": WorkloadShape(1, LengthRange(128, 128), LengthRange(512, 512)),
}
"""Workloads by name. ``mixed256`` has the very requests of public benches of small engines: 133,966 tokens out."""


@dataclass(frozen=True, slots=True)
class WorkloadItem:
    """One request: a prompt as token ids and the exact number of tokens to generate."""

    prompt_token_ids: list[int]
    output_len: int


def random_workload(shape: WorkloadShape, vocab_size: int, variant: int = 0) -> list[WorkloadItem]:
    """Draw the requests of ``shape``: first each prompt, its length before its ids, then all output lengths.

    Variants have the same lengths and other ids, so that one finds nothing of another in a prefix cache.
    """
    rng = random.Random(shape.seed)
    num_ids = min(HIGHEST_ID + 1, vocab_size)
    prompts = [
        [rng.randint(0, num_ids - 1) for _ in range(shape.input_lens.draw(rng))] for _ in range(shape.num_prompts)
    ]
    return [
        WorkloadItem([(token_id + variant) % num_ids for token_id in prompt], shape.output_lens.draw(rng))
        for prompt in prompts
    ]

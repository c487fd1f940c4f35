"""Random prompts of known lengths, the same for the same seed."""

import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WorkloadItem:
    """One request: a prompt as token ids and the exact number of tokens to generate."""

    prompt_token_ids: list[int]
    output_len: int


def random_workload(
    num_prompts: int, input_len: int, output_len: int, vocab_size: int, seed: int
) -> list[WorkloadItem]:
    """Draw ``num_prompts`` prompts of ``input_len`` uniform token ids in the upper part of the vocabulary.

    The lowest ids are left out, since control tokens usually live there.
    """
    rng = random.Random(seed)
    low = min(256, vocab_size // 2)
    return [
        WorkloadItem([rng.randrange(low, vocab_size) for _ in range(input_len)], output_len) for _ in range(num_prompts)
    ]


def random_text(num_words: int, rng: random.Random) -> str:
    """Return words that make about one token each; no two texts share a beginning."""
    words = ("time", "people", "water", "light", "house", "world", "music", "stone", "green", "small", "river", "night")
    return " ".join([str(rng.randrange(10**6)), *(rng.choice(words) for _ in range(max(0, num_words - 4)))])

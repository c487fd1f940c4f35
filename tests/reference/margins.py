"""The stored references, and when a token that differs from one is an error (the margin rule of invariant 8)."""

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

MIN_MARGIN = 1e-3  # where the two best logits lie closer, another token is no error, and what follows is not compared
MIN_COMPARED = 0.9  # of all tokens
FOLDER = Path(__file__).resolve().parent


def read_reference(name: str) -> list[dict[str, Any]]:
    """Return the prompts of ``greedy_reference.json`` or ``short_reference.json``, with what transformers answers."""
    prompts: list[dict[str, Any]] = json.loads((FOLDER / name).read_text())["prompts"]
    return prompts


def clear_tokens(prompt: dict[str, Any]) -> list[int]:
    """Return the reference's tokens up to the first close call."""
    clear = itertools.takewhile(lambda margin: margin >= MIN_MARGIN, prompt["margins"])
    return [token for token, _ in zip(prompt["output_token_ids"], clear, strict=False)]


def check_greedy(reference: Sequence[dict[str, Any]], outputs: Sequence[Sequence[int]]) -> None:
    """Raise AssertionError unless each output equals its reference as far as both go; most must have been compared."""
    num_compared = 0
    for place, (prompt, output) in enumerate(zip(reference, outputs, strict=True)):
        clear = clear_tokens(prompt)[: len(output)]
        assert list(output[: len(clear)]) == clear, f"prompt {place}"
        num_compared += len(clear)
    assert num_compared >= MIN_COMPARED * sum(map(len, outputs)) > 0


@torch.inference_mode()
def count_clear(oracle: Any, prompt: Sequence[int], output: Sequence[int], *, min_margin: float = MIN_MARGIN) -> int:
    """Raise AssertionError unless each token of ``output`` is what transformers' ``oracle`` finds best, where clear.

    The oracle sees the output's own tokens, so those after a close call count as well. Returns how many were clear.
    """
    best = oracle(torch.tensor([[*prompt, *output]])).logits[0, len(prompt) - 1 : -1].topk(2)
    is_clear = best.values[:, 0] - best.values[:, 1] >= min_margin
    expected, got = best.indices[is_clear, 0], torch.tensor(output)[is_clear]
    assert torch.equal(got, expected), f"{got.tolist()} instead of {expected.tolist()} after {prompt}"
    return int(is_clear.sum())

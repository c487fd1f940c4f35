"""Write short_reference.json: what transformers answers to 512 short prompts with the demo model's weights in fp32.

Run by hand, once per demo model: ``PYTHONPATH=tests python -m reference.make_short_reference``. Prompts are 32 tokens
of real text, of which most begin as others do; each is continued by 16 tokens, end-of-text ignored. All prompts are of
one length, so they run in batches without padding. ``margins`` are as in greedy_reference.json, cut to four places.
"""

import json
import math
import random
from pathlib import Path
from typing import Any

import torch
import transformers
from reference.make_greedy_reference import hash_of, load_in_transformers
from reference.prompts import MANUAL, PROMPTS, STORY
from transformers import AutoTokenizer

from aserve.demo_model import find_demo_model

NUM_PROMPTS, PROMPT_LEN, NUM_TOKENS = 512, 32, 16
BATCH_SIZE = 64
NUM_BEGINNINGS = 40  # that prompts share
SHARE_OF_SHARED = 0.7
LICENSE = Path(__file__).resolve().parents[2] / "LICENSE"
TARGET = Path(__file__).parent / "short_reference.json"


def main() -> None:
    """Load the demo with transformers, run all prompts and write the file."""
    path = find_demo_model().path
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    model = load_in_transformers(path)
    rows = []
    prompts = draw_prompts(tokenizer.encode(real_text(), add_special_tokens=False))
    for start in range(0, NUM_PROMPTS, BATCH_SIZE):
        rows += generate(model, prompts[start : start + BATCH_SIZE])
        print(f"{len(rows)} of {NUM_PROMPTS}", flush=True)
    header = {
        "model_sha256": hash_of(path),
        "transformers": transformers.__version__,
        "torch": torch.__version__,
    }
    lines = ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows)
    TARGET.write_text(f'{json.dumps(header)[:-1]}, "prompts": [\n{lines}\n]}}\n')


def real_text() -> str:
    """Return prose, legal text and the short prompts of the other reference, in several languages."""
    texts = [prompt.content for prompt in PROMPTS if isinstance(prompt.content, str)]
    return "\n\n".join([MANUAL, STORY, LICENSE.read_text(encoding="utf-8"), *texts])


def draw_prompts(text: list[int]) -> list[list[int]]:
    """Cut slices out of the tokens of a text; most start at one of a few places and go on elsewhere."""
    rng = random.Random(512)

    def cut(length: int) -> list[int]:
        start = rng.randrange(len(text) - length)
        return text[start : start + length]

    beginnings = [cut(PROMPT_LEN) for _ in range(NUM_BEGINNINGS)]
    prompts = []
    for _ in range(NUM_PROMPTS):
        num_shared = rng.randint(8, PROMPT_LEN) if rng.random() < SHARE_OF_SHARED else 0
        prompts.append(rng.choice(beginnings)[:num_shared] + cut(PROMPT_LEN - num_shared))
    return prompts


@torch.inference_mode()
def generate(model: torch.nn.Module, prompts: list[list[int]]) -> list[dict[str, Any]]:
    """Continue all prompts with the most likely token each time, and report how clear the choices were."""
    rows: list[dict[str, Any]] = [
        {"prompt_token_ids": prompt, "output_token_ids": [], "margins": []} for prompt in prompts
    ]
    step_ids, cache = torch.tensor(prompts), None
    for _ in range(NUM_TOKENS):
        result = model(step_ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache = result.past_key_values
        logits, top_ids = result.logits[:, -1].topk(2)
        step_ids = top_ids[:, :1]
        for row, token_id, (first, second) in zip(rows, step_ids[:, 0].tolist(), logits.tolist(), strict=True):
            row["output_token_ids"].append(token_id)
            row["margins"].append(math.floor((first - second) * 1e4) / 1e4)
    return rows


if __name__ == "__main__":
    main()

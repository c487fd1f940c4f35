"""Write greedy_reference.json: what transformers answers to 32 prompts with the demo model's weights in fp32.

Run by hand, once per demo model: ``PYTHONPATH=tests python -m reference.make_greedy_reference``. Each prompt is run
alone, 64 tokens, end-of-text ignored. ``margins`` are the differences between the two largest logits at each output
position; where one is below 1e-3 a different token is no error, and what follows it is not compared.
``first_top_ids`` are the five most likely tokens at the first position.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
import transformers
from doubles_models import read_demo_in_transformers
from reference.prompts import PROMPTS, Prompt
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from aserve.demo_model import find_demo_model

NUM_TOKENS = 64
TARGET = Path(__file__).parent / "greedy_reference.json"


def main() -> None:
    """Load the demo with transformers, run all prompts and write the file."""
    path = find_demo_model().path
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    model = load_in_transformers(path)
    prompts = []
    for prompt in PROMPTS:
        token_ids = encode(tokenizer, prompt)
        generated = generate(model, token_ids)
        print(f"{prompt.name}: {len(token_ids)} tokens, least margin {min(generated['margins']):.4f}", flush=True)
        prompts.append({"name": prompt.name, "prompt_token_ids": token_ids, **generated})
    header = {
        "model_sha256": hash_of(path),
        "transformers": transformers.__version__,
        "torch": torch.__version__,
    }
    rows = ",\n".join(json.dumps(prompt, separators=(",", ":")) for prompt in prompts)
    TARGET.write_text(f'{json.dumps(header)[:-1]}, "prompts": [\n{rows}\n]}}\n')


def hash_of(path: Path) -> str:
    """Return what identifies the weights that a reference was made with."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def load_in_transformers(path: Path) -> LlamaForCausalLM:
    """Return the demo model in fp32, built from what transformers reads of the GGUF file."""
    config, tensors = read_demo_in_transformers(path)
    model = LlamaForCausalLM(LlamaConfig(**config))
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])  # the head is tied
    model.tie_weights()
    return model.eval()


def encode(tokenizer: transformers.PreTrainedTokenizerBase, prompt: Prompt) -> list[int]:
    """Return the prompt's tokens, through the chat template if it is a conversation."""
    if isinstance(prompt.content, str):
        return tokenizer.encode(prompt.content, add_special_tokens=False)
    text = tokenizer.apply_chat_template(prompt.content, add_generation_prompt=True, tokenize=False)
    return tokenizer.encode(text, add_special_tokens=False)


@torch.inference_mode()
def generate(model: torch.nn.Module, token_ids: list[int]) -> dict[str, list[Any]]:
    """Continue with the most likely token each time, and report how clear the choices were."""
    output_ids: list[int] = []
    margins: list[float] = []
    first_top_ids: list[int] = []
    step_ids, cache = token_ids, None
    for _ in range(NUM_TOKENS):
        result = model(torch.tensor([step_ids]), past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache = result.past_key_values
        logits, top_ids = (top.tolist() for top in result.logits[0, -1].topk(5))
        first_top_ids = first_top_ids or top_ids
        output_ids.append(top_ids[0])
        margins.append(round(logits[0] - logits[1], 6))
        step_ids = top_ids[:1]
    return {"output_token_ids": output_ids, "margins": margins, "first_top_ids": first_top_ids}


if __name__ == "__main__":
    main()

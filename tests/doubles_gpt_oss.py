"""A tiny checkpoint of gpt-oss whose experts are in MXFP4, transformers' model of the same weights, and its tokens."""

from pathlib import Path
from typing import Any

import torch
from doubles_harmony import write_harmony_folder
from doubles_models import edit_config, make_oracle
from reference.margins import MIN_MARGIN, count_clear
from safetensors.torch import load_file, save_file
from torch import Tensor

from aserve.engine.llm import LLM
from aserve.model_files import ModelFiles
from aserve.request import SamplingParams
from aserve.tokenizer.load import load_tokenizer

GPT_OSS: dict[str, Any] = {
    "head_dim": 16,
    "num_local_experts": 6,
    "num_experts_per_tok": 3,
    "sliding_window": 6,
    "num_hidden_layers": 4,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 500.0,
        "factor": 4.0,
        "beta_fast": 8.0,
        "truncate": False,
        "original_max_position_embeddings": 16,
    },
}
NUM_TOKENS = 24  # of an answer; the window is 6
MXFP4 = {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}}


def make_mxfp4_checkpoint(folder: Path, changes: dict[str, Any] | None = None) -> Any:
    """Save a checkpoint with blocks and scales in the place of experts; return the oracle with what they stand for."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    oracle = make_oracle("gpt_oss", GPT_OSS | (changes or {}), folder)
    tensors = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(7)
    for name, tensor in list(tensors.items()):
        if name.endswith((".gate_up_proj", ".down_proj")):
            packed = draw_packed(tensor, generator)
            tensors |= {f"{name}_{kind}": part for kind, part in zip(("blocks", "scales"), packed, strict=True)}
            del tensors[name]
            with torch.no_grad():
                oracle.get_parameter(name).copy_(convert_moe_packed_tensors(*packed, dtype=torch.float32))
    save_file(tensors, folder / "model.safetensors")
    edit_config(folder, MXFP4)
    return oracle


def draw_packed(tensor: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return blocks and scales for a tensor [E, in, out], of numbers below one that differ in size between blocks."""
    num_experts, num_inputs, num_outputs = tensor.shape
    shape = (num_experts, num_outputs, num_inputs // 32)
    blocks = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
    return blocks, torch.randint(121, 125, shape, generator=generator, dtype=torch.uint8)


def make_served_checkpoint(folder: Path, changes: dict[str, Any] | None = None) -> Any:
    """Save a checkpoint with a tokenizer and a chat template; return the oracle."""
    oracle = make_mxfp4_checkpoint(folder, {"vocab_size": 264, "max_position_embeddings": 1024} | (changes or {}))
    write_harmony_folder(folder, edit_config(folder, {}))
    return oracle


def check_greedy(folder: Path, oracle: Any, *, margin: float = MIN_MARGIN, **settings: Any) -> None:
    """Run prompts that share a beginning, the same again, and a chat; each token that is clear must be the oracle's."""
    generator = torch.Generator().manual_seed(4)
    shared, *tails = (torch.randint(0, 256, (length,), generator=generator).tolist() for length in (30, 1, 5, 17, 40))
    prompts = [shared + tail for tail in tails]
    message = [{"role": "user", "content": "Hi"}]
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
    with LLM(folder, page_size=4, num_pages=200, max_model_len=400, **settings) as llm:
        answers, again = llm.generate(prompts, params), llm.generate(prompts, params)
        (chat,) = llm.generate([message], params)
    assert all(answer.num_cached_tokens >= 28 for answer in again)
    tokenizer = load_tokenizer(ModelFiles(folder, "safetensors", "tiny"))
    pairs = [*zip(prompts * 2, answers + again, strict=True), (tokenizer.encode_chat(message), chat)]
    assert all(len(answer.token_ids) == NUM_TOKENS for _, answer in pairs)
    num_clear = sum(count_clear(oracle, prompt, answer.token_ids, min_margin=margin) for prompt, answer in pairs)
    assert num_clear > NUM_TOKENS * len(pairs) / 2, "rounding could decide most"

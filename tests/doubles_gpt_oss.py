"""A tiny checkpoint of gpt-oss whose experts are in MXFP4, and transformers' model with the same weights."""

from pathlib import Path
from typing import Any

import torch
from doubles_models import edit_config, make_oracle
from safetensors.torch import load_file, save_file
from torch import Tensor

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

"""Tiny checkpoints of mixtures of experts, with a tokenizer."""

from pathlib import Path
from typing import Any

from doubles_harmony import write_harmony_folder
from doubles_models import edit_config, make_oracle

MIXTRAL: dict[str, Any] = {"num_local_experts": 5, "num_experts_per_tok": 2}
QWEN3_MOE: dict[str, Any] = {
    "head_dim": 16,
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "norm_topk_prob": True,
}


def make_served_moe(model_type: str, folder: Path, changes: dict[str, Any] | None = None) -> Any:
    """Save a checkpoint with a tokenizer and a chat template; return transformers' model."""
    own = {"mixtral": MIXTRAL, "qwen3_moe": QWEN3_MOE}[model_type]
    sizes = {"vocab_size": 264, "max_position_embeddings": 1024}
    oracle = make_oracle(model_type, own | sizes | (changes or {}), folder)
    write_harmony_folder(folder, edit_config(folder, {}))
    return oracle

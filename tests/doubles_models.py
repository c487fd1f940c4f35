"""For tests of models and loading: a paged step of one sequence, tiny checkpoints, and the transformers oracle."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from doubles_attention import torch_backend
from torch import Tensor

from aserve.attention.base import AttentionBatch, KVScales, LayerKV
from aserve.attention.context import ForwardContext
from aserve.kernels.operators import Operators
from aserve.model_files import ModelFiles
from aserve.models.decoder import Decoder
from aserve.weights.load import load_model

PAGE_SIZE = 4
TINY = {
    "vocab_size": 99,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}


class PagedSequence:
    """One sequence of a decoder over its own pool, whose pages are handed out in reverse order.

    Pages have 16 or 32 bits, so of ``scales`` only the transforms of keys count.
    """

    def __init__(
        self, model: Decoder, max_len: int, dtype: torch.dtype = torch.float32, scales: Sequence[KVScales] = ()
    ) -> None:
        config = model.config
        num_pages = -(-max_len // PAGE_SIZE)
        shape = (num_pages, PAGE_SIZE, config.num_kv_heads, config.head_dim)
        self._model = model
        self._kv = [
            LayerKV(torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype), key_transform=layer.key_transform)
            for layer in scales or [KVScales()] * config.num_layers
        ]
        self._pages = torch.arange(num_pages - 1, -1, -1)
        self._backend = torch_backend()
        self._num_computed = 0

    @torch.inference_mode()
    def step(self, token_ids: Sequence[int]) -> Tensor:
        """Compute the next tokens; return their logits [T, V]."""
        return self._model.compute_logits(self.hidden(token_ids))

    @torch.inference_mode()
    def hidden(self, token_ids: Sequence[int]) -> Tensor:
        """Compute the next tokens; return what the layers make of them, ahead of the last norm [T, E]."""
        positions = torch.arange(self._num_computed, self._num_computed + len(token_ids))
        self._num_computed += len(token_ids)
        batch = AttentionBatch(
            query_lens=[len(token_ids)],
            key_lens=[self._num_computed],
            num_decodes=int(len(token_ids) == 1),
            cu_query_lens=torch.tensor([0, len(token_ids)], dtype=torch.int32),
            key_lens_device=torch.tensor([self._num_computed], dtype=torch.int32),
            page_table=self._pages.to(torch.int32).unsqueeze(0),
            page_size=PAGE_SIZE,
        )
        slot_mapping = self._pages[positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE
        plan = self._backend.plan(batch)
        context = ForwardContext(positions, slot_mapping, self._backend, plan, self._kv, Operators())
        return self._model.forward(torch.tensor(token_ids), context)


def read_demo_in_transformers(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return (config fields, tensors) of the demo model as transformers' GGUF loader reads them."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    with torch.device("meta"):
        names_only = LlamaForCausalLM(LlamaConfig(**TINY | {"num_hidden_layers": 30}))
    parsed = load_gguf_checkpoint(path, return_tensors=True, model_to_load=names_only)
    return parsed["config"], parsed["tensors"]


def make_oracle(model_type: str, changes: dict[str, Any], folder: Path) -> Any:
    """Save a tiny random checkpoint of transformers to ``folder`` and return its model, fp32, with eager attention."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(model_type, **(TINY | changes))
    return save_with_noise(AutoModelForCausalLM.from_config(config, attn_implementation="eager"), folder)


def save_with_noise(model: Any, folder: Path) -> Any:
    """Draw the weights of a transformers ``model``, save it to ``folder`` and return it."""
    model.eval()
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.3 * noise if name.endswith("norm.weight") else 0.15 * noise)
    model.save_pretrained(folder)
    return model


def load_folder(path: Path, quantization: str = "none", dtype: torch.dtype = torch.float32) -> Decoder:
    """Load a safetensors folder (or a .gguf file) on the CPU."""
    files = ModelFiles(path, "gguf" if path.suffix == ".gguf" else "safetensors", path.name)
    cpu = torch.device("cpu")
    return load_model(files, device=cpu, dtype=dtype, quantization=quantization, operators=Operators()).model


def edit_config(folder: Path, changes: dict[str, Any]) -> dict[str, Any]:
    """Change fields of the folder's config.json; return the whole."""
    file = folder / "config.json"
    config: dict[str, Any] = json.loads(file.read_text()) | changes
    file.write_text(json.dumps(config))
    return config

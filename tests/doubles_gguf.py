"""Tiny GGUF files made of transformers models, as llama.cpp's converter would write them."""

from pathlib import Path
from typing import Any

from gguf import GGMLQuantizationType, GGUFWriter
from numpy.typing import NDArray

STEMS = {
    "embed_tokens": "token_embd",
    "lm_head": "output",
    "norm": "output_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "o_proj": "attn_output",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    "gate_proj": "ffn_gate",
    "up_proj": "ffn_up",
    "down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    """The GGUF name of a transformers parameter."""
    *path, stem, kind = name.split(".")
    return f"blk.{path[2]}.{STEMS[stem]}.{kind}" if "layers" in path else f"{STEMS[stem]}.{kind}"


def interleave_rotary_rows(weight: NDArray[Any], num_heads: int) -> NDArray[Any]:
    """What llama.cpp's converter does to query and key rows of llama models."""
    return (
        weight.reshape(num_heads, 2, weight.shape[0] // num_heads // 2, *weight.shape[1:])
        .swapaxes(1, 2)
        .reshape(weight.shape)
    )


class TinyFile:
    """A GGUF file made of a transformers model, with the means to spoil it before it is written."""

    def __init__(self, oracle: Any, arch: str) -> None:
        self.oracle, self.arch = oracle, arch
        config = oracle.config
        self.tensors: dict[str, tuple[NDArray[Any], GGMLQuantizationType]] = {}
        for name, parameter in oracle.named_parameters():
            values = parameter.detach().numpy()
            if arch == "llama" and ("q_proj" in name or "k_proj" in name):
                is_query = "q_proj" in name
                num_heads = config.num_attention_heads if is_query else config.num_key_value_heads
                values = interleave_rotary_rows(values, num_heads)
            self.tensors[gguf_name(name)] = (values, GGMLQuantizationType.F32)
        self.metadata: dict[str, Any] = {
            "block_count": config.num_hidden_layers,
            "context_length": config.max_position_embeddings,
            "embedding_length": config.hidden_size,
            "feed_forward_length": config.intermediate_size,
            "attention.head_count": config.num_attention_heads,
            "attention.head_count_kv": config.num_key_value_heads,
            "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
            "attention.key_length": config.head_dim if arch == "qwen3" else None,
            "rope.freq_base": config.rope_parameters["rope_theta"],
        }

    def add(self, name: str, values: NDArray[Any], kind: GGMLQuantizationType = GGMLQuantizationType.F32) -> None:
        self.tensors[name] = (values, kind)

    def write(self, path: Path) -> Path:
        writer = GGUFWriter(path, self.arch)
        for key, value in self.metadata.items():
            if isinstance(value, int):
                writer.add_uint32(f"{self.arch}.{key}", value)
            elif isinstance(value, float):
                writer.add_float32(f"{self.arch}.{key}", value)
            elif isinstance(value, str):
                writer.add_string(f"{self.arch}.{key}", value)
        for name, (values, kind) in self.tensors.items():
            writer.add_tensor(name, values, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

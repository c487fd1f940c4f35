"""The side of a speed comparison that runs in a process of its own, for aserve and for transformers.

``python -m aserve.bench.speed_peer NAME MODEL THREADS`` loads the model, prints ``{}``, and then answers each line
``{"prompts": [[ids]], "output_len": n}`` on standard input with ``{"seconds": s, "num_tokens": n}``. Both are greedy
and go on past the end-of-sequence token; the time is that of prefill and decoding, without loading.
"""

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson

Generate = Callable[[list[list[int]], int], int]  # prompts, output_len -> tokens generated


def main(name: str, model: str, num_threads: int) -> None:
    """Answer requests until standard input ends."""
    generate = {"aserve": load_aserve, "transformers": load_transformers}[name](model, num_threads)
    _answer({})
    for line in sys.stdin.buffer:
        request = orjson.loads(line)
        start_s = time.perf_counter()
        num_tokens = generate(request["prompts"], request["output_len"])
        _answer({"seconds": time.perf_counter() - start_s, "num_tokens": num_tokens})


def load_aserve(model: str, num_threads: int) -> Generate:
    """The engine as it serves, without the server; prompts differ, and its prefix cache is off all the same."""
    from aserve.config import EngineConfig
    from aserve.engine.llm import LLM
    from aserve.request import SamplingParams

    llm = LLM(EngineConfig(model=model, quantization="int8", num_threads=num_threads, prefix_cache=False))

    def generate(prompts: list[list[int]], output_len: int) -> int:
        params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)
        return sum(len(output.token_ids) for output in llm.generate(prompts, params))

    return generate


def load_transformers(model: str, num_threads: int) -> Generate:
    """``generate`` in float32 on one padded batch (all prompts are equally long)."""
    import torch

    torch.set_num_threads(num_threads)
    decoder = build_transformers_llama(Path(model))

    def generate(prompts: list[list[int]], output_len: int) -> int:
        token_ids = torch.tensor(prompts)
        output = decoder.generate(
            token_ids,
            attention_mask=torch.ones_like(token_ids),
            do_sample=False,
            min_new_tokens=output_len,
            max_new_tokens=output_len,
            pad_token_id=0,
        )
        return int(output.shape[0] * (output.shape[1] - token_ids.shape[1]))

    return generate


def build_transformers_llama(path: Path) -> Any:
    """Return transformers' Llama with the weights of a GGUF file in float32 (its own reader wants accelerate)."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from aserve.weights.gguf_file import GgufFile

    checkpoint = GgufFile(path)
    shape = checkpoint.config
    if shape.architecture != "LlamaForCausalLM":
        raise SystemExit(f"only Llama is compared with transformers, not {shape.architecture}")
    options: dict[str, Any] = {
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "rms_norm_eps": shape.rms_norm_eps,
        "max_position_embeddings": shape.max_context_len,
        "rope_theta": shape.rope.theta,
        "tie_word_embeddings": shape.is_head_tied,
    }
    decoder: Any = LlamaForCausalLM(LlamaConfig(**options))
    parameters = dict(decoder.named_parameters())
    with torch.no_grad():
        for stored in checkpoint.tensors():
            if stored.name in parameters:
                parameters[stored.name].copy_(stored.read())
    return decoder.float().eval()


def _answer(message: dict[str, float]) -> None:
    sys.stdout.buffer.write(orjson.dumps(message) + b"\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))

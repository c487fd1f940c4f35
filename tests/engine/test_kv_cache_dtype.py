"""Whole engines on a CPU whose pages hold keys and values in few bits."""

import json
from pathlib import Path

import pytest
from doubles_models import TINY

from aserve.config import EngineConfig
from aserve.engine.llm import LLM
from aserve.request import RequestOutput, SamplingParams

MODEL = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "head_dim": 32, "max_position_embeddings": 128}
BEGINNING = [(7 * i) % 99 for i in range(40)]  # two full pages and a half
PROMPTS = [[*BEGINNING, i, 3 * i + 1] for i in range(3)]


def generate(folder: Path, kv_cache_dtype: str, *, prefix_cache: bool) -> list[RequestOutput]:
    """Greedily, one prompt after the other, so that later ones can find the pages of earlier ones."""
    (folder / "config.json").write_text(json.dumps(TINY | MODEL | {"vocab_size": 1000}))
    config = EngineConfig(
        model=str(folder),
        random_weights=True,
        device="cpu",
        dtype="float32",
        num_threads=1,
        max_num_seqs=2,
        max_num_batched_tokens=32,
        num_pages=32,
        kv_cache_dtype=kv_cache_dtype,  # type: ignore[arg-type]
        prefix_cache=prefix_cache,
    )
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    with LLM(config) as llm:
        return [llm.generate([prompt], params)[0] for prompt in PROMPTS]


@pytest.mark.parametrize("kv_cache_dtype", ["fp8", "nvfp4"])
def test_pages_that_are_found_again_give_the_same_tokens(tmp_path: Path, kv_cache_dtype: str) -> None:
    alone = generate(tmp_path, kv_cache_dtype, prefix_cache=False)
    shared = generate(tmp_path, kv_cache_dtype, prefix_cache=True)
    assert [output.num_cached_tokens for output in alone] == [0, 0, 0]
    assert [output.num_cached_tokens for output in shared] == [0, 32, 32]
    assert [output.token_ids for output in shared] == [output.token_ids for output in alone]
    assert all(len(output.token_ids) == 12 for output in alone)

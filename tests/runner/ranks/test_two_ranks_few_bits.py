"""Keys of few bits, which go through a transform, on two gloo ranks: the tokens of an engine that is alone."""

from pathlib import Path

import pytest
from doubles_engine import LetterTokenizer
from doubles_models import make_oracle

from aserve.config import EngineConfig
from aserve.engine.llm import LLM
from aserve.request import SamplingParams

PROMPTS = [[(place * 7 + place * place + length) % 95 + 3 for place in range(length)] for length in (3, 17, 30, 41)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=9)


class OpenTokenizer(LetterTokenizer):
    """Knows no end, so there are no grammars, for which other ranks would look for a tokenizer in the folder."""

    eos_token_ids = frozenset()


def generate(folder: Path, kv_cache_dtype: str, num_ranks: int) -> list[list[int]]:
    """In chunks, on pages of 4 tokens for all ranks together."""
    config = EngineConfig(
        model=str(folder),
        device="cpu",
        dtype="float32",
        num_threads=1,
        decode_context_parallel_size=num_ranks,
        page_size=4 // num_ranks,
        num_pages=64,
        max_num_seqs=6,
        max_num_batched_tokens=16,
        max_model_len=64,
        kv_cache_dtype=kv_cache_dtype,  # type: ignore[arg-type]
    )
    with LLM(config, tokenizer=OpenTokenizer()) as llm:
        return [output.token_ids for output in llm.generate(PROMPTS, GREEDY)]


@pytest.mark.full
@pytest.mark.parametrize("kv_cache_dtype", ["fp8", "nvfp4"])
def test_two_ranks_give_the_tokens_of_one(kv_cache_dtype: str, tmp_path: Path) -> None:
    make_oracle("llama", {"num_hidden_layers": 2, "head_dim": 32}, tmp_path)
    alone = generate(tmp_path, kv_cache_dtype, 1)
    assert len({tuple(tokens) for tokens in alone}) == len(PROMPTS)
    assert generate(tmp_path, kv_cache_dtype, 2) == alone

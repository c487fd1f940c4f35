"""A tiny gpt-oss in MXFP4 behind the engine: batches, chunks, prefix hits, a chat; transformers' greedy tokens."""

from pathlib import Path
from typing import Any

import pytest
import torch
from doubles_gpt_oss import make_mxfp4_checkpoint
from doubles_harmony import write_harmony_folder
from doubles_models import edit_config

from aserve.engine.llm import LLM
from aserve.model_files import ModelFiles
from aserve.request import SamplingParams
from aserve.tokenizer.load import load_tokenizer

NUM_TOKENS = 24  # the window is 6


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """The folder, and transformers' model."""
    folder = tmp_path_factory.mktemp("gpt-oss")
    oracle = make_mxfp4_checkpoint(folder, {"vocab_size": 264, "max_position_embeddings": 1024})
    write_harmony_folder(folder, edit_config(folder, {}))
    return folder, oracle


@torch.inference_mode()
def count_clear(oracle: Any, prompt: list[int], answer: list[int]) -> int:
    """Check each token of ``answer`` whose margin is clear; return how many there are."""
    logits = oracle(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
    best = logits.topk(2)
    is_clear = best.values[:, 0] - best.values[:, 1] > 1e-3
    assert torch.equal(best.indices[is_clear, 0], torch.tensor(answer)[is_clear])
    return int(is_clear.sum())


@pytest.mark.parametrize("budget", [7, 512])
def test_greedy_tokens_equal_transformers(budget: int, checkpoint: tuple[Path, Any]) -> None:
    folder, oracle = checkpoint
    generator = torch.Generator().manual_seed(4)
    shared = torch.randint(0, 256, (30,), generator=generator).tolist()
    tails = [torch.randint(0, 256, (length,), generator=generator).tolist() for length in (1, 5, 17, 40)]
    prompts = [shared + tail for tail in tails]
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
    settings = {"device": "cpu", "dtype": "float32", "num_threads": 1, "num_pages": 200, "max_model_len": 400}
    with LLM(folder, max_num_batched_tokens=budget, page_size=4, **settings) as llm:
        answers = llm.generate(prompts, params)
        again = llm.generate(prompts, params)
        (chat,) = llm.generate([[{"role": "user", "content": "Hi"}]], params)
    tokenizer = load_tokenizer(ModelFiles(folder, "safetensors", "tiny"))
    prompts.append(tokenizer.encode_chat([{"role": "user", "content": "Hi"}]))
    clear = [count_clear(oracle, p, a.token_ids) for p, a in zip(prompts, [*answers, chat], strict=True)]
    assert sum(clear) > 0.9 * NUM_TOKENS * len(prompts)
    assert [answer.token_ids for answer in again] == [answer.token_ids for answer in answers]
    assert all(answer.num_cached_tokens >= 28 for answer in again)

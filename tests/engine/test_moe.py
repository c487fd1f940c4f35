"""Tiny mixtures of experts behind the engine: batches, chunks, prefix hits, a chat; transformers' greedy tokens."""

from pathlib import Path

import pytest
from doubles_gpt_oss import check_greedy
from doubles_moe import make_served_moe


@pytest.mark.parametrize(("model_type", "budget"), [("mixtral", 7), ("qwen3_moe", 512)])
def test_greedy_tokens_equal_transformers(model_type: str, budget: int, tmp_path: Path) -> None:
    oracle = make_served_moe(model_type, tmp_path)
    check_greedy(tmp_path, oracle, device="cpu", dtype="float32", num_threads=1, max_num_batched_tokens=budget)

"""A tiny gpt-oss in MXFP4 behind the engine: batches, chunks, prefix hits, a chat; transformers' greedy tokens."""

from pathlib import Path

import pytest
from doubles_gpt_oss import check_greedy, make_served_checkpoint


@pytest.mark.parametrize("budget", [7, 512])
def test_greedy_tokens_equal_transformers(budget: int, tmp_path: Path) -> None:
    oracle = make_served_checkpoint(tmp_path)
    check_greedy(tmp_path, oracle, device="cpu", dtype="float32", num_threads=1, max_num_batched_tokens=budget)

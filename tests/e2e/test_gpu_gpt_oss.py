"""A tiny gpt-oss in MXFP4 on a GPU: graphs, sinks and experts as an engine runs them, with transformers' tokens."""

from pathlib import Path

import pytest
from doubles_gpt_oss import check_greedy, make_served_checkpoint

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize("budget", [7, 512])
def test_greedy_tokens_equal_transformers(budget: int, backend: str, tmp_path: Path) -> None:
    oracle = make_served_checkpoint(tmp_path)
    settings = {"attention_backend": backend, "max_num_batched_tokens": budget, "max_num_seqs": 8}
    check_greedy(tmp_path, oracle, device="cuda", dtype="float32", **settings)


def test_clear_tokens_in_bfloat16(tmp_path: Path) -> None:
    """Each token takes all experts, since rounding could change which. Heads of 64, for which there are kernels."""
    oracle = make_served_checkpoint(tmp_path, {"num_experts_per_tok": 6, "head_dim": 64})
    check_greedy(tmp_path, oracle, margin=0.15, device="cuda", dtype="bfloat16", max_num_seqs=8)

"""Mixtures of experts on a GPU, as an engine runs them: tiny ones with transformers' tokens, and one of true size."""

from pathlib import Path

import pytest
from doubles_gpt_oss import check_greedy
from doubles_moe import make_served_moe

from aserve.engine.llm import LLM
from aserve.request import SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]


@pytest.mark.parametrize("budget", [7, 512])
@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe"])
def test_greedy_tokens_equal_transformers(model_type: str, budget: int, tmp_path: Path) -> None:
    oracle = make_served_moe(model_type, tmp_path)
    settings = {"attention_backend": "torch", "max_num_batched_tokens": budget, "max_num_seqs": 8}
    check_greedy(tmp_path, oracle, device="cuda", dtype="float32", **settings)


def test_clear_tokens_in_bfloat16(tmp_path: Path) -> None:
    """Each token takes all experts, since rounding could change which. Heads of 64, for which there are kernels."""
    oracle = make_served_moe("qwen3_moe", tmp_path, {"num_experts_per_tok": 6, "head_dim": 64})
    check_greedy(tmp_path, oracle, margin=0.15, device="cuda", dtype="bfloat16", max_num_seqs=8)


@pytest.mark.xdist_group("large")
def test_a_model_of_true_size_with_random_weights() -> None:
    """61 GB of weights: drawn, captured and run."""
    params = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True)
    prompt = list(range(1000, 1200))
    with LLM("Qwen3-30B-A3B", random_weights=True, max_num_seqs=16, max_model_len=1024, num_pages=2048) as llm:
        answers = llm.generate([prompt, *([900 + i] * (3 + i) for i in range(15))], params)
    assert [len(answer.token_ids) for answer in answers] == [16] * 16
    assert len({tuple(answer.token_ids) for answer in answers}) > 1

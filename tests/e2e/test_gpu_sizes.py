"""Models of true size with random weights on a GPU: drawn, captured and run by the backend that they get by default."""

import math

import pytest

from aserve.engine.llm import LLM
from aserve.request import FinishReason, SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300), pytest.mark.xdist_group("large")]
NUM_REQUESTS, NUM_TOKENS = 16, 16
PARAMS = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True, logprobs=1)
LONG_PROMPT = list(range(1000, 2200))  # cut into chunks, beyond the windows of Gemma 3 and gpt-oss


@pytest.mark.parametrize("model", ["gemma-2-9b", "gemma-3-4b", "Phi-3-mini-4k", "gpt-oss-20b"])
def test_a_model_of_true_size_with_random_weights(model: str) -> None:
    """Decodes and mixed steps, all in graphs."""
    prompts = [LONG_PROMPT, *([900 + i] * (3 + i) for i in range(NUM_REQUESTS - 1))]
    sizes = {"max_num_seqs": NUM_REQUESTS, "max_num_batched_tokens": 512, "max_model_len": 2048, "num_pages": 2048}
    with LLM(model, random_weights=True, **sizes) as llm:
        answers = llm.generate(prompts, PARAMS)
    assert [answer.finish_reason for answer in answers] == [FinishReason.LENGTH] * NUM_REQUESTS
    assert [len(answer.token_ids) for answer in answers] == [NUM_TOKENS] * NUM_REQUESTS
    assert len({tuple(answer.token_ids) for answer in answers}) > 1
    chosen = [place.logprob for answer in answers for place in answer.logprobs or []]
    assert len(chosen) == NUM_REQUESTS * NUM_TOKENS
    assert all(math.isfinite(logprob) for logprob in chosen)

"""Which steps are run before the first client's."""

import pytest

from aserve.runner.warm_up import warm_up_plans
from aserve.scheduler.limits import Limits

COUNTS = [1, 2, 4, 8, 64, 256, 512]


def make_limits(max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int) -> Limits:
    return Limits(
        vocab_size=100,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        num_pages=64,
        page_size=16,
    )


@pytest.mark.parametrize(
    ("max_num_seqs", "max_num_batched_tokens", "max_model_len"),
    [(320, 8192, 4096), (4, 8192, 4096), (1, 8, 4096), (320, 64, 4096), (1, 8192, 2), (2, 300, 200)],
)
def test_all_numbers_of_tokens_that_a_step_may_have_are_run(
    max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int
) -> None:
    """As decodes where there are rows, else as a prompt that is scored; no step is larger than one may be."""
    limits = make_limits(max_num_seqs, max_num_batched_tokens, max_model_len)
    plans = list(warm_up_plans(limits, COUNTS))
    num_decodes = min(max_num_seqs, max_num_batched_tokens)
    longest_prompt = min(max_model_len - 1, max_num_batched_tokens)
    decoded = {plan.num_tokens for plan in plans if plan.num_computed[0]}
    scored = {plan.num_tokens for plan in plans if plan.row_starts[0].params.prompt_logprobs is not None}
    assert decoded == {1, num_decodes, *(count for count in COUNTS if count <= num_decodes)}
    assert scored == {count for count in COUNTS if num_decodes < count <= longest_prompt}
    for plan in plans:
        assert plan.num_tokens <= max_num_batched_tokens
        assert len(plan.rows) <= max_num_seqs
        assert set(plan.rows) == {max_num_seqs}, "only the dummy row"
        ends = map(sum, zip(plan.num_computed, plan.num_scheduled, strict=True))
        assert max(ends) <= max_model_len


def test_a_device_of_one_kernel_for_all_runs_few_steps() -> None:
    decodes = [plan for plan in warm_up_plans(make_limits(32, 512, 4096)) if plan.is_decode]
    assert [plan.num_tokens for plan in decodes] == [1, 32]

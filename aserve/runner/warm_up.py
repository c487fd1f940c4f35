"""Steps that touch every path of usual size before the first client does; they run on the dummy row."""

from collections.abc import Iterable, Iterator

from aserve.request import SamplingParams
from aserve.scheduler.limits import Limits
from aserve.scheduler.plan import RowStart, StepPlan

PROMPT_LEN = 64
SAMPLING_KINDS = (
    SamplingParams(temperature=0.0, logprobs=1),
    SamplingParams(temperature=0.7, top_k=20, top_p=0.9, min_p=0.05, presence_penalty=0.5),
)


SCORED = SamplingParams(temperature=0.0, prompt_logprobs=0)


def warm_up_plans(limits: Limits, token_counts: Iterable[int] = ()) -> Iterator[StepPlan]:
    """Yield a prefill for each way of sampling, then decodes of one row and of all.

    Where kernels differ by the tokens of a step, ``token_counts`` are those to run as well: as decodes, or as a prompt
    whose tokens are scored where there are fewer rows.
    """
    prompt_len = min(PROMPT_LEN, limits.max_model_len - 1, limits.max_num_batched_tokens)
    for params in SAMPLING_KINDS:
        yield dummy_plan(limits.max_num_seqs, [(0, prompt_len)], params, limits.num_pages)
    num_decodes = min(limits.max_num_seqs, limits.max_num_batched_tokens)
    for count in sorted({1, num_decodes, *token_counts}):
        if count <= num_decodes:
            yield dummy_plan(limits.max_num_seqs, [(prompt_len, 1)] * count)
        elif count <= min(limits.max_model_len - 1, limits.max_num_batched_tokens):
            yield dummy_plan(limits.max_num_seqs, [(0, count)], SCORED)


def dummy_plan(
    dummy_row: int,
    spans: list[tuple[int, int]],
    params: SamplingParams | None = None,
    dummy_page: int | None = None,
) -> StepPlan:
    """Return a sampled step over ``(num_computed, num_scheduled)`` spans of the dummy row, greedy unless said.

    With a ``dummy_page`` the step also writes to the page table what stands there already.

    Its keys land on the dummy pages, one over the other: the result means nothing, the work is real.
    """
    prompt_len = max(computed + scheduled for computed, scheduled in spans)
    start = RowStart(dummy_row, [0] * prompt_len, prompt_len, 0, params or SamplingParams(temperature=0.0))
    return StepPlan(
        step_id=-1,
        rows=[dummy_row] * len(spans),
        num_computed=[computed for computed, _ in spans],
        num_scheduled=[scheduled for _, scheduled in spans],
        is_sampled=[True] * len(spans),
        num_decodes=len(spans) if all(scheduled == 1 for _, scheduled in spans) else 0,
        row_starts=[start],
        page_updates=[] if dummy_page is None else [(dummy_row, 0, dummy_page)],
    )

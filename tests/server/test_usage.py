"""Token counts of an answer while its choices come in, in whatever order."""

import itertools

from openai.types import CompletionUsage

from aserve.request import RequestOutput
from aserve.server.usage import UsageTally


def output(num_prompt: int, num_output: int, num_cached: int) -> RequestOutput:
    return RequestOutput("r", "", [], num_prompt, num_output, num_cached)


def counts(tally: UsageTally) -> tuple[int, int, int]:
    usage = CompletionUsage.model_validate(tally.body(), strict=True)
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.prompt_tokens_details is not None
    return usage.prompt_tokens, usage.completion_tokens, usage.prompt_tokens_details.cached_tokens or 0


def test_a_prompt_counts_once_whichever_of_its_choices_begins() -> None:
    outputs = {0: output(10, 3, 0), 1: output(10, 4, 8), 2: output(20, 5, 16), 3: output(20, 6, 0)}
    for order in itertools.permutations(outputs):
        tally = UsageTally(2)
        assert counts(tally) == (0, 0, 0)
        tally.note(order[0], outputs[order[0]])
        assert counts(tally)[:2] == (outputs[order[0]].num_prompt_tokens, outputs[order[0]].num_output_tokens)
        for choice in order:
            tally.note(choice, outputs[choice])
        assert counts(tally) == (30, 18, 16)  # cached tokens are those of the first choice of each prompt


def test_later_totals_replace_earlier_ones() -> None:
    tally = UsageTally(1)
    for num_output in (1, 2, 7):
        tally.note(0, output(5, num_output, 4))
        assert counts(tally) == (5, num_output, 4)

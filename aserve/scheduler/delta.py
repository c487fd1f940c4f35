"""What one commit brought for one sequence."""

from dataclasses import dataclass

from aserve.request import FinishReason, TokenLogprobs


@dataclass(slots=True)
class SequenceDelta:
    """New tokens of one request. The last one carries ``finish_reason``; none follows an abort.

    A token that ended the request (EOS or one of ``stop_token_ids``) is among ``token_ids``, counts as output and is
    named in ``stop_token_id``. ``prompt_logprobs`` comes once, with the first delta; its first entry is None.
    ``error`` is set if and only if ``finish_reason`` is ERROR.
    """

    request_id: str
    token_ids: list[int]
    num_cached_tokens: int
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    error: str | None = None


def join_deltas(deltas: list[SequenceDelta]) -> list[SequenceDelta]:
    """Return one delta in place of those which a step brought for one sequence; an error stays a delta of its own."""
    joined, *others = deltas
    for delta in others:
        if delta.error is not None:
            return [joined, delta]
        joined.token_ids += delta.token_ids
        if joined.logprobs is not None and delta.logprobs is not None:
            joined.logprobs += delta.logprobs
        joined.finish_reason, joined.stop_token_id = delta.finish_reason, delta.stop_token_id
    return [joined]

"""What is refused before it enters the queue, because it could never run."""

from collections.abc import Sequence

from aserve.errors import ClientError, ContextLengthError
from aserve.request import Request
from aserve.scheduler.limits import Limits


def check_request(request: Request, limits: Limits) -> None:
    """Raise ClientError if ``request`` names an unknown token in its parameters or can never fit."""
    check_length(request, limits)
    request.params.check_vocabulary(limits.vocab_size)


def check_length(request: Request, limits: Limits) -> None:
    """Raise ClientError if the prompt is empty or, with a token of output where one is wanted, too long."""
    num_tokens = len(request.prompt_token_ids)
    if not num_tokens:
        raise ClientError("the prompt has no tokens", param="prompt")
    longest = min(limits.max_model_len, limits.num_pages * limits.page_size)
    is_only_scored = request.params.max_tokens == 0
    if num_tokens + (not is_only_scored) > longest:
        limit = "maximum context length" if longest == limits.max_model_len else "room for keys and values"
        reason = f"this model's {limit} is {longest} tokens" + ("" if is_only_scored else ", one of them for output")
        raise ContextLengthError(num_tokens, longest - (not is_only_scored), param="prompt", reason=reason)


def check_tokens(prompt: Sequence[int], limits: Limits) -> None:
    """Raise ClientError if ``prompt`` names a token id that does not exist."""
    if min(prompt) < 0 or max(prompt) >= limits.vocab_size:
        raise ClientError(f"the prompt names a token id outside [0, {limits.vocab_size})", param="prompt")


def longest_len(request: Request, limits: Limits) -> int:
    """Return the most tokens, prompt and output, that ``request`` may reach.

    The last one is never computed, so it needs no slot: alone in the pool a sequence can be one longer than the pool.
    """
    longest = min(limits.max_model_len, limits.num_pages * limits.page_size + 1)
    if request.params.max_tokens is None:
        return longest
    return min(longest, len(request.prompt_token_ids) + request.params.max_tokens)

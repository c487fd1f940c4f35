"""The four forms of a completion's ``prompt``, told apart and bounded; no I/O."""

from typing import Any

import msgspec

from aserve.errors import ClientError
from aserve.server.schema import MAX_ANSWERS

OnePrompt = str | list[int]


def parse_prompts(prompt: Any, n: int, vocab_size: int) -> list[OnePrompt]:
    """Return one entry per prompt; raise ClientError for an empty one, a wrong type or a token id that is none.

    ``prompt`` is a string, a list of strings, a list of token ids, or a list of such lists.
    """
    if isinstance(prompt, str):
        return [_checked(prompt, vocab_size)]
    if not isinstance(prompt, list) or not prompt:
        raise ClientError("prompt must be a string, a list of strings, or lists of token ids", param="prompt")
    if not isinstance(prompt[0], str | list):
        return [_checked(prompt, vocab_size)]
    if len(prompt) * n > MAX_ANSWERS:
        raise ClientError(f"prompts times n must not exceed {MAX_ANSWERS}", param="prompt")
    return [_checked(one, vocab_size) for one in prompt]


def _checked(prompt: Any, vocab_size: int) -> OnePrompt:
    if not prompt:
        raise ClientError("a prompt must not be empty", param="prompt")
    if isinstance(prompt, str):
        return prompt
    try:
        token_ids = msgspec.convert(prompt, list[int])
    except msgspec.ValidationError:
        raise ClientError("a prompt must be a string or a list of token ids", param="prompt") from None
    if min(token_ids) < 0 or max(token_ids) >= vocab_size:
        raise ClientError(f"a prompt names a token id outside [0, {vocab_size})", param="prompt")
    return token_ids

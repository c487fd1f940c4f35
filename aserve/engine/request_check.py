"""What a request must be before the scheduler sees it."""

import dataclasses
import secrets
import time
from collections.abc import Container
from typing import Any

from aserve.errors import ClientError
from aserve.request import Request
from aserve.scheduler.admission import check_length, check_tokens
from aserve.scheduler.limits import Limits


class RequestCheck:
    """Looks at each token of a prompt once, though the choices of a request bring it again and again."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._checked_prompt: tuple[int, ...] = ()  # the newest whose tokens are right

    def admit(self, request: Request, open_ids: Container[str]) -> Request:
        """Return ``request`` with seed, time of arrival and prompt as the trace needs them.

        Raises ClientError if it is wrong, can never fit or has one of ``open_ids``.
        """
        self._check(request, open_ids)
        changes: dict[str, Any] = {}
        if request.params.seed is None:  # resolved here, so that a trace can be replayed
            changes["params"] = dataclasses.replace(request.params, seed=secrets.randbits(63))
        if type(request.prompt_token_ids) is not tuple:  # the trace writes no other type
            changes["prompt_token_ids"] = tuple(request.prompt_token_ids)
        if not request.arrival_time_s:
            changes["arrival_time_s"] = time.monotonic()
        return dataclasses.replace(request, **changes) if changes else request

    def _check(self, request: Request, open_ids: Container[str]) -> None:
        if request.request_id in open_ids:
            raise ClientError(f"request id {request.request_id!r} is in use", param="request_id")
        check_length(request, self._limits)
        prompt = request.prompt_token_ids
        if prompt is self._checked_prompt:
            return
        if not {int}.issuperset(map(type, prompt)):
            raise ClientError("the prompt must be a list of integers", param="prompt")
        check_tokens(prompt, self._limits)
        self._checked_prompt = prompt

"""What surrounds the content of one answer of /v1/messages: its id, why it ended, and its token counts."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from aserve.parsing.answer_reader import AnswerReader
from aserve.request import FinishReason, Request, RequestOutput, SamplingParams
from aserve.server.messages.schema import MessagesRequest


@dataclass(frozen=True, slots=True)
class MessagesAnswer:
    """Identity of one answer. ``max_model_len`` is how many tokens the model's context holds."""

    request: MessagesRequest
    model: str
    max_model_len: int
    message_id: str = field(default_factory=lambda: f"msg_{uuid4().hex}")
    arrival_time_s: float = field(default_factory=time.monotonic)

    def engine_request(self, prompt_ids: tuple[int, ...], params: SamplingParams) -> Request:
        """Return what the engine is asked; ``params`` are the request's, completed by what is known of the model."""
        return Request(
            request_id=self.message_id,
            prompt_token_ids=prompt_ids,
            params=params,
            priority=self.request.priority,
            arrival_time_s=self.arrival_time_s,
        )

    def started(self, num_prompt_tokens: int) -> dict[str, Any]:
        """Return the message as a stream begins it; nobody knows yet what the cache will spare."""
        usage = {
            "input_tokens": num_prompt_tokens,
            "cache_creation_input_tokens": None,
            "cache_read_input_tokens": None,
            "output_tokens": 0,
        }
        return self._message([], {"stop_reason": None, "stop_sequence": None}, usage)

    def finished(
        self, content: Sequence[dict[str, Any]], last: RequestOutput, reader: AnswerReader | None
    ) -> dict[str, Any]:
        """Return the whole message."""
        return self._message(content, self.ending(last, reader), self.usage(last, reader))

    def ending(self, last: RequestOutput, reader: AnswerReader | None) -> dict[str, Any]:
        """Return why the answer ended with ``last``; one that was cut within a call never passes for a whole call."""
        if isinstance(last.stop_reason, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": last.stop_reason}
        reason = "tool_use" if reader is not None and reader.has_whole_calls else "end_turn"
        if last.finish_reason is FinishReason.LENGTH:
            reason = "max_tokens" if self._is_as_long_as_asked(last) else "model_context_window_exceeded"
        return {"stop_reason": reason, "stop_sequence": None}

    def usage(self, last: RequestOutput, reader: AnswerReader | None) -> dict[str, Any]:
        """Return the token counts; the three of the input add up to the prompt."""
        counts: dict[str, Any] = {
            "input_tokens": last.num_prompt_tokens - last.num_cached_tokens,
            "cache_creation_input_tokens": 0,  # what is written to the cache costs nobody anything
            "cache_read_input_tokens": last.num_cached_tokens,
            "output_tokens": last.num_output_tokens,
        }
        if reader is not None:
            counts["output_tokens_details"] = {"thinking_tokens": reader.num_reasoning_tokens}
        return counts

    def _is_as_long_as_asked(self, last: RequestOutput) -> bool:
        max_tokens = self.request.params.max_tokens
        return max_tokens is not None and last.num_output_tokens >= max_tokens

    def _message(
        self, content: Sequence[dict[str, Any]], ending: dict[str, Any], usage: dict[str, Any]
    ) -> dict[str, Any]:
        return {
            "id": self.message_id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": content,
            **ending,
            "usage": usage,
        }

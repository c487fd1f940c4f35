"""The fields that all chunks of an answer share, and the bytes that are built from them once."""

import time
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from aserve import __version__
from aserve.request import Request
from aserve.server.schema import AnswerOptions
from aserve.server.sse import encode_json
from aserve.server.usage import UsageTally

SYSTEM_FINGERPRINT = f"fp_aserve_{__version__}"


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """Identity of one answer. ``kind`` is the ``object`` field."""

    id_prefix: str
    kind: str
    model: str
    options: AnswerOptions
    tally: UsageTally
    unique: str = field(default_factory=lambda: uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))
    arrival_time_s: float = field(default_factory=time.monotonic)

    def request(self, prompt_ids: tuple[int, ...], choice: int) -> Request:
        """Return the engine's request for one choice."""
        return Request(
            request_id=f"{self.id_prefix}-{self.unique}-{choice}",
            prompt_token_ids=prompt_ids,
            params=self.options.params_of(choice % self.options.n),
            priority=self.options.priority,
            arrival_time_s=self.arrival_time_s,
        )

    def fields(self) -> dict[str, Any]:
        """Return the fields that come before ``choices``."""
        return {
            "id": f"{self.id_prefix}-{self.unique}",
            "object": self.kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": SYSTEM_FINGERPRINT,
        }

    def chunk_start(self) -> bytes:
        """Return an event up to and including the opening bracket of ``choices``."""
        return b"data: " + encode_json(self.fields())[:-1] + b',"choices":['

    def chunk_end(self) -> bytes:
        """Return the end of an event, from the bracket that closes ``choices``."""
        if self.options.continuous_usage:
            return b'],"usage":' + encode_json(self.tally.body()) + b"}\n\n"
        return b'],"usage":null}\n\n' if self.options.include_usage else b"]}\n\n"

    def usage_chunk(self) -> bytes:
        """Return the event with empty choices, if it was asked for."""
        if not self.options.include_usage:
            return b""
        return self.chunk_start() + b'],"usage":' + encode_json(self.tally.body()) + b"}\n\n"

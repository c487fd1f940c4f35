"""A hash that two ranks share only as long as they executed the same steps and sampled the same tokens."""

from dataclasses import fields
from hashlib import blake2b
from typing import Any

from aserve.distributed.messages import encode
from aserve.scheduler.plan import StepPlan, StepTokens

NUM_BYTES = 16


class StepDigest:
    """Chained over all steps, so that it covers the input ids of each: they are given by a plan or sampled earlier."""

    def __init__(self) -> None:
        self._digest = bytes(NUM_BYTES)

    def advance(self, plan: StepPlan, tokens: StepTokens) -> bytes:
        """Take in the next step and return the hash of all so far."""
        facts = encode((plan_integers(plan), tokens.token_ids, sorted(tokens.errors.items()), tokens.ended))
        self._digest = blake2b(self._digest + facts, digest_size=NUM_BYTES).digest()
        return self._digest


def plan_integers(plan: StepPlan) -> tuple[Any, ...]:
    """Return all of ``plan`` but the sampling parameters, which show in what is sampled."""
    starts = [(start.row, start.token_ids, start.prompt_len, start.seed) for start in plan.row_starts]
    return (starts, *(getattr(plan, field.name) for field in fields(plan) if field.name != "row_starts"))

"""What a step costs and how much fits in one.

The unit is what one token costs in the linear layers. Attention makes a token dearer by ``context_cost`` for
each earlier one, so n tokens after c earlier ones cost n * (1 + context_cost * (c + n / 2)).
"""

from collections.abc import Iterable
from math import sqrt

PROMPT_SHARE = 0.25  # of a step, kept for prompts while there are any


class TokenBudget:
    """The arithmetic of budgets in this unit."""

    def __init__(self, context_cost: float) -> None:
        self.context_cost = context_cost

    def cost(self, num_tokens: int, num_computed: int) -> float:
        """Return the cost of ``num_tokens`` tokens after ``num_computed``."""
        return num_tokens * (1.0 + self.context_cost * (num_computed + num_tokens / 2))

    def largest_chunk(self, budget: float, num_computed: int) -> int:
        """Return how many tokens after ``num_computed`` cost at most ``budget``."""
        if budget < 1.0:
            return 0
        if not self.context_cost:
            return int(budget)
        linear = 1.0 + self.context_cost * num_computed
        chunk = int((sqrt(linear * linear + 2 * self.context_cost * budget) - linear) / self.context_cost)
        while chunk and self.cost(chunk, num_computed) > budget:  # rounding
            chunk -= 1
        return chunk

    def decodes_cost(self, contexts: Iterable[int], num_decodes: int) -> float:
        """Return the cost of one token after each of ``contexts``."""
        if not self.context_cost:
            return float(num_decodes)
        return num_decodes + self.context_cost * (sum(contexts) + num_decodes / 2)

    def count_decodes(self, contexts: list[int], budget: float) -> int:
        """Return how many of the first ``contexts`` fit in ``budget``; at least one, so that each step gets on."""
        if self.decodes_cost(contexts, len(contexts)) <= budget:
            return len(contexts)
        for num_decodes, context in enumerate(contexts):
            budget -= self.cost(1, context)
            if budget < 0:
                return max(1, num_decodes)
        return len(contexts)

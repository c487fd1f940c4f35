"""Token counts of one answer, over all of its choices."""

from typing import Any

from aserve.request import RequestOutput


class UsageTally:
    """Adds up the outputs of the choices. ``n`` consecutive choices share a prompt, which is counted once."""

    def __init__(self, n: int) -> None:
        self._n = n
        self._last: dict[int, tuple[int, int, int]] = {}  # choice -> prompt, output and cached tokens

    def note(self, choice: int, output: RequestOutput) -> None:
        """Take the totals so far of ``choice``."""
        self._last[choice] = (output.num_prompt_tokens, output.num_output_tokens, output.num_cached_tokens)

    def body(self) -> dict[str, Any]:
        """Return the ``usage`` object."""
        firsts = [counts for choice, counts in self._last.items() if choice % self._n == 0]
        num_prompt = sum(counts[0] for counts in firsts)
        num_output = sum(counts[1] for counts in self._last.values())
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_output,
            "total_tokens": num_prompt + num_output,
            "prompt_tokens_details": {"cached_tokens": sum(counts[2] for counts in firsts)},
        }

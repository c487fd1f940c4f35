"""Token counts of one answer, over all of its choices."""

from typing import Any

from aserve.request import RequestOutput


class UsageTally:
    """Adds up the outputs of the choices. ``n`` consecutive choices share a prompt, which is counted once.

    A prompt's counts are those of its first choice that has begun. Totals are kept up to date, for a stream may show
    them with each of a thousand choices' tokens.
    """

    def __init__(self, n: int) -> None:
        self._n = n
        self._outputs: dict[int, int] = {}  # choice -> output tokens
        self._prompts: dict[int, tuple[int, int, int]] = {}  # prompt -> choice, prompt tokens, cached tokens
        self._reasoning: dict[int, int] = {}  # choice -> tokens of its reasoning, where that is told apart
        self._num_output = self._num_prompt = self._num_cached = self._num_reasoning = 0

    def note(self, choice: int, output: RequestOutput) -> None:
        """Take the totals so far of ``choice``."""
        self._num_output += output.num_output_tokens - self._outputs.get(choice, 0)
        self._outputs[choice] = output.num_output_tokens
        prompt = choice // self._n
        first, num_prompt, num_cached = self._prompts.get(prompt, (choice, 0, 0))
        if choice <= first:
            self._prompts[prompt] = (choice, output.num_prompt_tokens, output.num_cached_tokens)
            self._num_prompt += output.num_prompt_tokens - num_prompt
            self._num_cached += output.num_cached_tokens - num_cached

    def note_reasoning(self, choice: int, num_tokens: int) -> None:
        """Take how many of the output tokens of ``choice`` were reasoning so far."""
        self._num_reasoning += num_tokens - self._reasoning.get(choice, 0)
        self._reasoning[choice] = num_tokens

    def body(self) -> dict[str, Any]:
        """Return the ``usage`` object."""
        reasoning = {"completion_tokens_details": {"reasoning_tokens": self._num_reasoning}} if self._reasoning else {}
        return {
            "prompt_tokens": self._num_prompt,
            "completion_tokens": self._num_output,
            "total_tokens": self._num_prompt + self._num_output,
            "prompt_tokens_details": {"cached_tokens": self._num_cached},
            **reasoning,
        }

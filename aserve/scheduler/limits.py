"""What the loaded model on its device allows; the scheduler plans with it, the runner measures it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """Measured or resolved at start, never configured directly."""

    vocab_size: int
    max_model_len: int  # tokens, prompt and output together
    max_num_seqs: int  # rows of the page table, the dummy row not counted
    max_num_batched_tokens: int  # token budget of a step
    num_pages: int  # pages that may be handed out; the dummy page is not among them
    page_size: int  # tokens per page
    max_num_chunks: int | None = None  # prefill chunks of one step; None = as many as there are rows
    max_num_drafts: int | None = None  # draft tokens of one step; None = as many as the budget allows
    context_cost: float = 0.0  # cost of attending to one earlier token, in units of one token's linear layers

    def __str__(self) -> str:
        pages = f"{self.num_pages} pages of {self.page_size} tokens"
        steps = f"{self.max_num_batched_tokens} tokens a step"
        return f"{self.max_num_seqs} sequences of at most {self.max_model_len} tokens, {steps}, {pages}"

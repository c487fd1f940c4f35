"""The two forms that cross the border to the device side: StepPlan down, StepTokens back.

Both are plain lists of integers, so that other ranks, the scripted runner and a trace file look
the same.
"""

from dataclasses import dataclass, field

from aserve.request import SamplingParams, TokenLogprobs


@dataclass(slots=True)
class RowStart:
    """A sequence enters (or, after preemption, re-enters) the batch on a row of the page table.

    The runner writes ``token_ids`` (the prompt and every committed output token) to
    ``token_pool[row, 0:len]`` and resets the row's sampling state. Tokens past ``prompt_len`` are
    outputs, which penalties count.
    """

    row: int
    token_ids: list[int]
    prompt_len: int
    seed: int  # resolved: never None; the sample at a position depends on (seed, position) alone
    params: SamplingParams
    request_id: str = ""  # for logs and queue times; devices do not need it


@dataclass(slots=True)
class StepPlan:
    """One forward over one ragged batch: which rows, how far, and what the device must learn first.

    Row i computes tokens ``num_computed[i] .. num_computed[i] + num_scheduled[i] - 1`` of
    ``token_pool[rows[i]]``; its keys end where these tokens end. If ``is_sampled[i]``, the logits of its last
    token are sampled and the new id is written to ``token_pool[row, num_computed + num_scheduled]``
    on the device, where the next step finds it without the host.

    Decodes (one token, sampled) stand first. Next come the rows that verify drafts, one list of ``drafts`` for each:
    the device writes these to ``token_pool[row, num_computed + 1 : num_computed + num_scheduled]``, computes them
    after the one token that is known, and samples after every token of the row. What it samples then stands where the
    drafts stood. Chunks of prompts come last.
    """

    step_id: int
    rows: list[int] = field(default_factory=list)
    num_computed: list[int] = field(default_factory=list)
    num_scheduled: list[int] = field(default_factory=list)
    is_sampled: list[bool] = field(default_factory=list)
    num_decodes: int = 0
    row_starts: list[RowStart] = field(default_factory=list)
    page_updates: list[tuple[int, int, int]] = field(default_factory=list)  # (row, page index in row, page)
    drafts: list[list[int]] = field(default_factory=list)  # of rows num_decodes, num_decodes + 1, ...

    @property
    def num_tokens(self) -> int:
        """Tokens that this step computes."""
        return sum(self.num_scheduled)

    @property
    def num_sampled(self) -> int:
        """Tokens that this step samples."""
        return sum(self.is_sampled) + sum(map(len, self.drafts))

    @property
    def num_chunks(self) -> int:
        """Chunks of prompts."""
        return len(self.rows) - self.num_decodes - len(self.drafts)

    @property
    def is_decode(self) -> bool:
        """True if every row extends by one token and samples."""
        return self.num_decodes == len(self.rows)


@dataclass(slots=True)
class StepTokens:
    """What a step sampled: one entry per sampled row, and one more for each of its drafts, in the order of the plan.

    A row that verifies drafts has what follows each of its tokens; as far as drafts are what was sampled, the next
    entry counts, too. What failed has token id -1 and its message in ``errors`` (keyed by its place among all
    entries); its neighbours are not affected. ``prompt_logprobs`` is keyed by
    place in the plan and holds one entry per scheduled prompt token, for the token that follows it
    (none for a chunk's last token if that token is sampled from). ``ended`` lists the places, among all
    entries, after whose token a grammar allows nothing but the end.
    """

    step_id: int
    token_ids: list[int]
    logprobs: list[TokenLogprobs | None] | None = None
    prompt_logprobs: dict[int, list[TokenLogprobs]] | None = None
    errors: dict[int, str] = field(default_factory=dict)
    ended: list[int] = field(default_factory=list)
    step_time_s: float = 0.0

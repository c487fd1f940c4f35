"""Chooses the next token of every sampled row of a step, as tensors, without waiting for the device.

Order: raw log probabilities are set aside; then logit bias, min_tokens and penalties; then what a grammar rules
out; then the most likely token, or a draw. What a row gets depends on its own logits, parameters, seed and position
alone, and on its own output where it has a grammar.
"""

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from aserve.request import TokenLogprobs
from aserve.sampling.draw import Filters, FilterValues, draw_tokens
from aserve.sampling.logprobs import LogprobTensors, compute_logprobs, list_logprobs
from aserve.sampling.row_params import NO_FILTERS, Column, Need, RowParams, final_token_ids
from aserve.sampling.token_counts import TokenCounts
from aserve.sampling.token_mask import ban_tokens, byte_bits
from aserve.sampling.uniform import advance
from aserve.scheduler.plan import RowStart, StepTokens
from aserve.structured.compile import GrammarCompiler
from aserve.structured.row_grammars import RowGrammars

if TYPE_CHECKING:
    from aserve.sampling.gpu.token_picker import TokenPicker  # needs triton

IntArray = NDArray[np.int64]
Upload = Callable[[NDArray[np.generic]], Tensor]  # to the sampler's device; the array may change afterwards
BAD_LOGITS = "the model's logits for this sequence are not finite"


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """What a step sampled, still on the device. Bad rows hold id 0, which is safe to embed."""

    token_ids: Tensor  # [N] int64
    is_bad: Tensor  # [N] bool: no token could be chosen
    logprobs: LogprobTensors | None  # of M rows
    logprob_places: IntArray  # [M], among the N
    num_logprobs: list[int]  # M
    followed: "FollowedRows | None" = None

    def tensors(self) -> list[Tensor]:
        """What ``report`` needs on the host."""
        return [self.token_ids, self.is_bad, *(self.logprobs or ())]

    def report(self, step_id: int, on_host: Sequence[Tensor]) -> StepTokens:
        """Return the result of the step; ``on_host`` are copies of ``tensors()``.

        Also moves grammars on, so it is called once, and before their rows are sampled again.
        """
        token_ids: list[int] = on_host[0].tolist()
        is_bad = on_host[1].numpy()
        errors = dict.fromkeys(np.flatnonzero(is_bad).tolist(), BAD_LOGITS)
        for place in errors:
            token_ids[place] = -1
        reports: list[TokenLogprobs | None] | None = None
        if self.logprobs is not None:
            reports = [None] * len(token_ids)
            listed = list_logprobs(LogprobTensors(*on_host[2:]), self.num_logprobs)
            for place, logprobs in zip(self.logprob_places.tolist(), listed, strict=True):
                reports[place] = None if place in errors else logprobs
        tokens = StepTokens(step_id, token_ids, logprobs=reports, errors=errors)
        if self.followed is not None:
            self.followed.grammars.settle(tokens, self.followed.places, self.followed.rows)
        return tokens


@dataclass(frozen=True, slots=True)
class FollowedRows:
    """The rows of a step that have a grammar, and their places among those sampled."""

    grammars: RowGrammars
    places: list[int]
    rows: list[int]


class Sampler:
    """Keeps the sampling state of ``num_rows`` rows of the page table.

    A GPU chooses with the kernels of ``picker``, its own if none is given, and without Triton in plain torch.
    """

    def __init__(
        self,
        num_rows: int,
        vocab_size: int,
        eos_token_ids: Set[int],
        device: torch.device,
        upload: Upload,
        picker: "TokenPicker | None" = None,
        compiler: GrammarCompiler | None = None,
    ) -> None:
        self._picker = picker or _make_picker(num_rows, vocab_size, device)
        self._upload = upload
        self._eos_token_ids = eos_token_ids
        self._params = RowParams(num_rows, vocab_size)
        self._never = torch.full((), -torch.inf, device=device)  # on the device: a number there would be a wait
        self._counts = TokenCounts(num_rows, vocab_size, device)
        self._final_ids: dict[int, IntArray] = {}  # row -> ids that min_tokens forbids
        self._byte_bits = byte_bits(device)
        self._compiler = compiler
        self._grammars: RowGrammars | None = None  # made for the first row that has one
        self._shape = num_rows, vocab_size

    def start_row(self, start: RowStart) -> None:
        """Reset a row for the sequence that enters."""
        final_ids = final_token_ids(start, self._eos_token_ids)
        self._params.start_row(start, final_ids)
        needs = Need(int(self._params.needs[start.row]))
        if Need.PENALTIES in needs:
            token_ids = self._upload(np.array(start.token_ids, np.int64))
            self._counts.start_row(start.row, token_ids[: start.prompt_len], token_ids[start.prompt_len :])
        self._final_ids.pop(start.row, None)
        if Need.MIN_TOKENS in needs:
            self._final_ids[start.row] = np.array(final_ids, np.int64)
        if self._grammars is not None:
            self._grammars.leave_row(start.row)
        if Need.GRAMMAR in needs:
            self._row_grammars().start_row(start)

    def reserve(self) -> int:
        """Allocate now what rows may need on the device later, and return its bytes."""
        return self._counts.reserve()

    def warm_up(self, logits: Tensor) -> None:
        """Compile and load what choosing from ``logits`` [N, V] may need, so that nothing does later."""
        if self._picker is not None:
            self._picker.warm_up(logits)

    def are_plain(self, rows: IntArray, positions: IntArray | None = None) -> bool:
        """Whether all ``rows`` [N] are greedy or draw from all tokens, and want nothing else.

        Then ``plain_inputs`` says all that a device needs to know of them. With the ``positions`` [N] of the new
        tokens, rows count whose min_tokens lie behind them.
        """
        return bool((self._params.plain_from[rows] <= (0 if positions is None else positions)).all())

    def plain_inputs(
        self,
        rows: IntArray,
        positions: IntArray,
        out_uniforms: NDArray[np.float64],
        out_temperatures: NDArray[np.float32],
    ) -> None:
        """Fill [N] each: a number in [0, 1) and the temperature, 0 for the most likely token."""
        advance(self._params.states[rows], positions, out_uniforms)
        np.take(self._params.draw_temperatures, rows, out=out_temperatures, mode="clip")  # "raise" would buffer

    def sample(self, logits: Tensor, rows: IntArray, positions: IntArray) -> SampledTokens:
        """Choose one token for each of the N ``rows``; one that verifies drafts may stand among them several times.

        ``logits`` [N, V] float32 are overwritten; ``positions`` [N] are those of the new tokens.
        """
        needs = self._params.needs[rows]
        places = np.flatnonzero(needs & Need.LOGPROBS)
        reported = self._upload(places) if places.size else None
        raw = None if reported is None else logits[reported]
        logits = self._adjust(logits, rows, positions, needs)
        followed = self._apply_grammars(logits, rows, needs)
        token_ids, is_bad = self._choose(logits, rows, positions, needs)
        self._count(token_ids, is_bad, rows, needs)
        num_logprobs = self._params.num_logprobs[rows[places]].tolist()
        logprobs = None
        if reported is not None and raw is not None:
            logprobs = compute_logprobs(raw, token_ids[reported], max(num_logprobs))
        return SampledTokens(token_ids, is_bad, logprobs, places, num_logprobs, followed)

    def _adjust(self, logits: Tensor, rows: IntArray, positions: IntArray, needs: NDArray[np.uint8]) -> Tensor:
        """Apply what changes single logits: bias, the ban on ending early, penalties."""
        if (places := np.flatnonzero(needs & Need.BIAS)).size:
            biased = self._upload(places).unsqueeze(1), self._upload(self._params.bias_ids[rows[places]])
            logits.index_put_(biased, self._upload(self._params.biases[rows[places]]), accumulate=True)
        can_be_early = needs & (Need.MIN_TOKENS | Need.GRAMMAR) == Need.MIN_TOKENS  # a grammar's mask sees to it itself
        is_early = can_be_early & (positions < self._params.free_positions[rows])
        if (places := np.flatnonzero(is_early)).size:
            final_ids = [self._final_ids[row] for row in rows[places].tolist()]
            banned = np.repeat(places, [len(ids) for ids in final_ids]), np.concatenate(final_ids)
            logits.index_put_((self._upload(banned[0]), self._upload(banned[1])), self._never)
        if (places := np.flatnonzero(needs & Need.PENALTIES)).size:
            at, table_rows = self._upload(places), self._upload(rows[places])
            penalties = self._upload(self._params.values[rows[places], Column.PENALTIES])
            logits[at] = self._counts.penalize(logits[at], table_rows, penalties)
        return logits

    def _apply_grammars(self, logits: Tensor, rows: IntArray, needs: NDArray[np.uint8]) -> FollowedRows | None:
        """Rule out what the rows' grammars do not allow; returns the rows that have one."""
        places = np.flatnonzero(needs & Need.GRAMMAR)
        if not places.size:
            return None
        grammars = self._row_grammars()
        masks = self._upload(grammars.masks[rows[places]])
        ban_tokens(logits, self._upload(places), masks, self._byte_bits)
        return FollowedRows(grammars, places.tolist(), rows[places].tolist())

    def _row_grammars(self) -> RowGrammars:
        if self._grammars is None:
            if self._compiler is None:
                raise RuntimeError("a row has a grammar, but this sampler was made without a compiler")
            self._grammars = RowGrammars(*self._shape, self._compiler)
        return self._grammars

    def _choose(
        self, logits: Tensor, rows: IntArray, positions: IntArray, needs: NDArray[np.uint8]
    ) -> tuple[Tensor, Tensor]:
        """Return token ids [N] int64, 0 for bad rows, and which are bad [N]."""
        if self._picker is not None:
            token_ids = self._pick(self._picker, logits, rows, positions)
            return token_ids.clamp(min=0), token_ids < 0
        best, token_ids = logits.max(-1)
        is_bad = ~torch.isfinite(best)
        self._draw(logits, token_ids, rows, positions, needs)
        return token_ids.masked_fill_(is_bad, 0), is_bad

    def _pick(self, picker: "TokenPicker", logits: Tensor, rows: IntArray, positions: IntArray) -> Tensor:
        """Return token ids [N] int64, -1 for bad rows."""
        params = self._params
        uniforms = self._upload(advance(params.states[rows], positions))
        temperatures = params.draw_temperatures[rows]
        filters = params.values[rows, Column.TOP_K : Column.MIN_P + 1]
        token_ids = torch.empty(rows.size, dtype=torch.int32, device=logits.device)
        if (temperatures[(filters != NO_FILTERS).any(1)] > 0).any():
            columns = self._upload(np.column_stack((temperatures, filters)).T)
            picker.pick_filtered(logits, uniforms, columns[0], FilterValues(*columns[1:]), token_ids)
        else:
            picker.pick_plain(logits, uniforms, self._upload(temperatures), token_ids)
        return token_ids.long()

    def _draw(
        self, logits: Tensor, token_ids: Tensor, rows: IntArray, positions: IntArray, needs: NDArray[np.uint8]
    ) -> None:
        """Replace the most likely token by a drawn one where a row asks for it."""
        places = np.flatnonzero(needs & Need.DRAW)
        if not places.size:
            return
        values = self._params.values[rows[places]]
        uniforms = advance(self._params.states[rows[places]], positions[places])
        temperature, top_k, top_p, min_p = self._upload(values[:, : Column.MIN_P + 1]).unbind(1)
        filters = Filters(
            top_k,
            top_p,
            min_p,
            max_top_k=int(values[:, Column.TOP_K].max()),
            has_top_p=bool((values[:, Column.TOP_P] < 1).any()),
            has_min_p=bool(values[:, Column.MIN_P].any()),
        )
        at = self._upload(places)
        drawn_from = logits if places.size == rows.size else logits[at]
        token_ids[at] = draw_tokens(drawn_from, self._upload(uniforms), temperature, filters)

    def _count(self, token_ids: Tensor, is_bad: Tensor, rows: IntArray, needs: NDArray[np.uint8]) -> None:
        if (places := np.flatnonzero(needs & Need.PENALTIES)).size:
            at = self._upload(places)
            self._counts.add(self._upload(rows[places]), token_ids[at], ~is_bad[at])


def _make_picker(num_rows: int, vocab_size: int, device: torch.device) -> "TokenPicker | None":
    if device.type != "cuda" or find_spec("triton") is None:
        return None
    from aserve.sampling.gpu.token_picker import TokenPicker

    return TokenPicker(num_rows, vocab_size, device)

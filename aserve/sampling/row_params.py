"""The sampling parameters of every row of the page table, as host arrays that a step indexes by its rows."""

from collections.abc import Sequence, Set
from enum import IntFlag

import numpy as np

from aserve.request import MAX_LOGIT_BIAS
from aserve.sampling.uniform import spread_seeds
from aserve.scheduler.plan import RowStart

NEVER = 2**62  # a position that no sequence reaches
SMALLEST_TEMPERATURE = 1e-5  # below it the best token has all the mass in float32


class Need(IntFlag):
    """What a row wants beyond the most likely token."""

    DRAW = 1
    PENALTIES = 2
    BIAS = 4
    MIN_TOKENS = 8
    LOGPROBS = 16
    GRAMMAR = 32


class Column:
    """Columns of ``RowParams.values``."""

    TEMPERATURE, TOP_K, TOP_P, MIN_P = range(4)
    PENALTIES = slice(4, 7)  # repetition, presence, frequency
    COUNT = 7


NO_FILTERS = np.array([0.0, 1.0, 0.0], np.float32)  # top_k, top_p, min_p


class RowParams:
    """One entry a row; a new sequence on a row overwrites all of it."""

    def __init__(self, num_rows: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self.needs = np.zeros(num_rows, np.uint8)  # of Need
        self.values = np.zeros((num_rows, Column.COUNT), np.float32)
        self.states = np.zeros(num_rows, np.uint64)  # of the row's random numbers
        self.draw_temperatures = np.zeros(num_rows, np.float32)  # 0 for rows that do not draw
        self.plain_from = np.zeros(num_rows, np.int64)  # position from which on the row is greedy or a draw from all
        self.num_logprobs = np.zeros(num_rows, np.int64)
        self.free_positions = np.zeros(num_rows, np.int64)  # from here on the sequence may end
        self.bias_ids = np.zeros((num_rows, MAX_LOGIT_BIAS), np.int64)
        self.biases = np.zeros((num_rows, MAX_LOGIT_BIAS), np.float32)  # unused entries add 0 to token 0

    def start_row(self, start: RowStart, final_ids: Sequence[int]) -> None:
        """Take the parameters of the sequence that enters; ``final_ids`` would end it."""
        row, params = start.row, start.params
        self.values[row] = (
            params.temperature,
            params.top_k if 0 < params.top_k < self._vocab_size else 0,
            params.top_p,
            params.min_p,
            params.repetition_penalty,
            params.presence_penalty,
            params.frequency_penalty,
        )
        self.states[row] = spread_seeds(np.array([start.seed % 2**64], np.uint64))[0]
        self.num_logprobs[row] = params.logprobs or 0
        self.free_positions[row] = start.prompt_len + params.min_tokens
        self.biases[row] = 0.0
        if params.logit_bias:
            self.bias_ids[row, : len(params.logit_bias)] = list(params.logit_bias)
            self.biases[row, : len(params.logit_bias)] = list(params.logit_bias.values())
        self.needs[row] = needs = find_needs(start, has_final_ids=bool(final_ids))
        self.draw_temperatures[row] = params.temperature if Need.DRAW in needs else 0.0
        self.plain_from[row] = self._find_plain(row, needs)

    def _find_plain(self, row: int, needs: Need) -> int:
        is_filtered = Need.DRAW in needs and bool(
            (self.values[row, Column.TOP_K : Column.MIN_P + 1] != NO_FILTERS).any()
        )
        if is_filtered or needs & ~(Need.DRAW | Need.MIN_TOKENS):
            return NEVER
        return int(self.free_positions[row]) if Need.MIN_TOKENS in needs else 0


def find_needs(start: RowStart, *, has_final_ids: bool) -> Need:
    """Return what the row wants; a top_k of 1 and a top_p of 0 leave only the most likely token."""
    params = start.params
    needs = Need(0)
    if params.temperature >= SMALLEST_TEMPERATURE and params.top_k != 1 and params.top_p > 0:
        needs |= Need.DRAW
    if params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0:
        needs |= Need.PENALTIES
    if params.logit_bias:
        needs |= Need.BIAS
    if params.min_tokens > 0 and has_final_ids:
        needs |= Need.MIN_TOKENS
    if params.logprobs is not None:
        needs |= Need.LOGPROBS
    if params.grammar is not None:
        needs |= Need.GRAMMAR
    return needs


def final_token_ids(start: RowStart, eos_token_ids: Set[int]) -> list[int]:
    """Return the ids that would end the sequence."""
    eos = set() if start.params.ignore_eos else eos_token_ids
    return sorted({*start.params.stop_token_ids, *eos})

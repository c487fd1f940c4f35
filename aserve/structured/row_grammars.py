"""Follows the output of each row through its grammar and says which tokens may come next.

A mask is made as soon as the token before it is known, so that it is ready when the row is sampled again. All
calls for one row come one after the other; no torch here, a mask is a row of bits.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from llguidance import LLExecutor, LLMatcher
from llguidance.numpy import fill_next_token_bitmask, fill_next_token_bitmask_par
from numpy.typing import NDArray

from aserve.errors import ClientError
from aserve.request import SamplingParams
from aserve.scheduler.plan import RowStart, StepTokens
from aserve.structured.compile import GrammarCompiler, first_lines
from aserve.structured.reasoning_budget import ReasoningBudget

PARALLEL_FROM = 4  # rows; fewer are filled before threads have woken up
DEAD_END = "no token of the model's vocabulary continues the grammar here"


@dataclass(slots=True)
class _Follower:
    """Where one row stands in its grammar."""

    matcher: LLMatcher
    num_outputs: int
    params: SamplingParams
    stop_words: NDArray[np.int32]  # the mask of all tokens that end the request, end tokens included
    budget: ReasoningBudget | None
    is_complete: bool = False  # nothing but the end may follow


class RowGrammars:
    """The grammars of the rows of a page table. ``masks`` [rows, ceil(V / 32)]: bit i of a row allows token i.

    Tokens that ``min_tokens`` or ``ignore_eos`` rule out are allowed only where the grammar allows no other.
    """

    def __init__(self, num_rows: int, vocab_size: int, compiler: GrammarCompiler) -> None:
        self.masks = np.full((num_rows, (vocab_size + 31) // 32), -1, np.int32)
        self._compiler = compiler
        self._end_words = self._words(compiler.eos_token_ids)
        self._followers: dict[int, _Follower] = {}
        self._errors: dict[int, str] = {}  # row -> why no further token can be sampled
        self._executor: LLExecutor | None = None

    def start_row(self, start: RowStart) -> None:
        """Begin the grammar of the sequence that enters, past the outputs that it has already.

        What goes wrong is reported by ``settle`` once the row is sampled.
        """
        self.leave_row(start.row)
        params = start.params
        assert params.grammar is not None
        try:
            compiled = self._compiler.compile(params.grammar)
        except ClientError as error:
            self._errors[start.row] = error.message
            return
        outputs = start.token_ids[start.prompt_len :]
        stop_words = self._end_words | self._words(params.stop_token_ids)
        budget = compiled.new_budget(self._compiler.load_vocabulary())
        follower = _Follower(compiled.start(), len(outputs), params, stop_words, budget)
        self._followers[start.row] = follower
        if not outputs:
            self.masks[start.row] = compiled.first_mask
        elif follower.matcher.consume_tokens(outputs):
            for token_id in outputs:
                self._note(follower, token_id)
            self._fill([start.row])
        else:
            self._fail(start.row)
            return
        self._examine(start.row)

    def leave_row(self, row: int) -> None:
        """Forget what ``row`` followed, if anything."""
        self._followers.pop(row, None)
        self._errors.pop(row, None)
        self.masks[row] = -1

    def settle(self, tokens: StepTokens, places: Sequence[int], rows: Sequence[int]) -> None:
        """Move ``rows`` on by what a step sampled at ``places``, and make the masks for what comes next.

        Adds to ``tokens`` which of them failed and which are complete.
        """
        moved = []
        for place, row in zip(places, rows, strict=True):
            if place in tokens.errors:
                continue
            if row not in self._errors and self._consume(row, tokens.token_ids[place]):
                moved.append(row)
            if (error := self._errors.get(row)) is not None:
                tokens.errors[place] = error
                tokens.token_ids[place] = -1
                if tokens.logprobs is not None:
                    tokens.logprobs[place] = None
        self._fill(moved)
        for row in moved:
            self._examine(row)
        for place, row in zip(places, rows, strict=True):
            if place not in tokens.errors and self._followers[row].is_complete:
                tokens.ended.append(place)

    def _consume(self, row: int, token_id: int) -> bool:
        """Move ``row`` on by one token; False if there is no next mask to make."""
        follower = self._followers[row]
        if follower.is_complete:  # the step was in flight when that became known
            return False
        follower.num_outputs += 1
        if token_id in self._compiler.eos_token_ids:
            follower.is_complete = True
            return False
        if not follower.matcher.consume_token(token_id):
            self._fail(row)
            return False
        self._note(follower, token_id)
        return True

    def _note(self, follower: _Follower, token_id: int) -> None:
        """Count a token that the grammar has taken."""
        if follower.budget is not None:
            follower.budget.follow(token_id, self._compiler.piece(token_id))

    def _fill(self, rows: Sequence[int]) -> None:
        """Make the masks of ``rows``; where a token is forced, it is the only one."""
        free = [row for row in rows if not self._forced(row)]
        if len(free) < PARALLEL_FROM:
            for row in free:
                fill_next_token_bitmask(self._followers[row].matcher, self.masks, row)
        else:
            self._executor = self._executor or LLExecutor()
            pairs = [(self._followers[row].matcher, row) for row in free]
            fill_next_token_bitmask_par(self._executor, pairs, self.masks)
        for row in rows:
            if forced := self._forced(row):
                self.masks[row] = self._words(forced[:1])

    def _forced(self, row: int) -> list[int]:
        budget = self._followers[row].budget
        return [] if budget is None else budget.forced

    def _examine(self, row: int) -> None:
        """Draw conclusions from a new mask."""
        follower, mask = self._followers[row], self.masks[row]
        if not (mask & ~self._end_words).any():
            if follower.matcher.is_error() or not follower.matcher.is_accepting():
                self._fail(row)
            else:
                follower.is_complete = follower.num_outputs > 0  # else the end must still be sampled
            return
        going_on = mask & ~self._avoided_words(follower)
        if going_on.any():
            self.masks[row] = going_on

    def _avoided_words(self, follower: _Follower) -> NDArray[np.int32]:
        """Return the mask of tokens that the request does not want where another will do."""
        if follower.num_outputs < follower.params.min_tokens:
            return follower.stop_words
        return self._end_words if follower.params.ignore_eos else np.zeros_like(self._end_words)

    def _fail(self, row: int) -> None:
        self._errors[row] = first_lines(self._followers[row].matcher.get_error()) or DEAD_END
        self.masks[row] = -1

    def _words(self, token_ids: Iterable[int]) -> NDArray[np.int32]:
        """Return a row of a mask in which only ``token_ids`` are set."""
        words = np.zeros(self.masks.shape[1], np.uint32)
        for token_id in token_ids:
            words[token_id // 32] |= np.uint32(1 << token_id % 32)
        return words.view(np.int32)

"""Shared by tests of structured output: compilers for known vocabularies, masks as sets, tokens for texts."""

from functools import cache

import numpy as np
from doubles_http import demo_tokenizer
from numpy.typing import NDArray

from aserve.request import GrammarSpec, SamplingParams
from aserve.scheduler.plan import RowStart, StepTokens
from aserve.structured.compile import GrammarCompiler
from aserve.structured.row_grammars import RowGrammars

EOS = 2
PROMPT = (5, 6, 7)


@cache
def demo_compiler() -> GrammarCompiler:
    return GrammarCompiler(demo_tokenizer())


def allowed(mask: NDArray[np.int32]) -> set[int]:
    """Return the token ids that a row of masks allows."""
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


def start(row: int, grammar: GrammarSpec | None, outputs: tuple[int, ...] = (), **params: object) -> RowStart:
    sampling = SamplingParams(grammar=grammar, **params)  # type: ignore[arg-type]
    return RowStart(row, [*PROMPT, *outputs], len(PROMPT), 0, sampling)


def new_rows(num_rows: int = 8) -> RowGrammars:
    return RowGrammars(num_rows, demo_tokenizer().vocab_size, demo_compiler())


def advance(rows: RowGrammars, tokens: dict[int, int]) -> StepTokens:
    """Sample ``tokens`` (row -> token) in one step and return what is reported of it."""
    step = StepTokens(1, list(tokens.values()))
    rows.settle(step, list(range(len(tokens))), list(tokens))
    return step


def nested_choice(depth: int) -> dict[str, object]:
    """Return a small schema that takes long to compile."""
    if depth == 0:
        return {"type": "string"}
    inner = nested_choice(depth - 1)
    return {"oneOf": [{"type": "object", "properties": {name: inner}} for name in "ab"]}

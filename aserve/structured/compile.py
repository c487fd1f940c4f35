"""From a grammar's text to what rows can follow, once for each grammar.

Sizes are checked in ``request.py``, form in ``grammar_text.py``. Compiling blocks, so callers do it off the event
loop; what comes from clients is tried in a process of its own first (``trial.py``).
"""

import threading
from collections import OrderedDict

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask
from numpy.typing import NDArray

from aserve.errors import ClientError
from aserve.request import GrammarSpec
from aserve.structured.answer_rules import AnswerRules
from aserve.structured.grammar_text import to_llguidance
from aserve.structured.reasoning_budget import ReasoningBudget
from aserve.structured.vocabulary import TokenBytes, build_vocabulary
from aserve.tokenizer.tokenizer import Tokenizer

MAX_CACHED = 256  # grammars and refusals
NOTHING_FITS = "no output of this model can match the grammar"
LIMITS = LLParserLimits(  # for one mask, tens of milliseconds; for one grammar, tens of MB
    step_lexer_fuel=100_000,
    step_max_items=20_000,
    max_lexer_states=50_000,
    max_grammar_size=200_000,
    verbose_errors=False,
)
MAX_MESSAGE_CHARS = 500


class CompiledGrammar:
    """A grammar over one vocabulary. Immutable; any number of rows may follow it at once."""

    def __init__(self, spec: GrammarSpec, vocabulary: LLTokenizer) -> None:
        """Raises ClientError if ``spec`` cannot be used or no output can begin."""
        self._matcher = LLMatcher(vocabulary, to_llguidance(spec), log_level=0, limits=LIMITS)
        if error := self._matcher.get_error():
            raise ClientError(f"the {spec.kind} cannot be used: {first_lines(error)}", param="grammar")
        masks = allocate_token_bitmask(1, vocabulary.vocab_size)
        fill_next_token_bitmask(self._matcher, masks)
        if self._matcher.is_stopped() and not self._matcher.is_accepting():
            raise ClientError(NOTHING_FITS, param="grammar")
        self.first_mask: NDArray[np.int32] = masks[0]  # [ceil(V / 32)]
        rules = AnswerRules.of(spec) if spec.kind == "answer" else None
        self._budgeted = rules if rules is not None and rules.max_reasoning_tokens is not None else None

    def start(self) -> LLMatcher:
        """Return a matcher of one's own, at the beginning."""
        return self._matcher.deep_copy()

    def new_budget(self, vocabulary: LLTokenizer) -> ReasoningBudget | None:
        """Return what watches how long one answer thinks, None if it may think for as long as it wants."""
        rules = self._budgeted
        if rules is None or rules.max_reasoning_tokens is None:
            return None
        return ReasoningBudget(rules, rules.max_reasoning_tokens, vocabulary.tokenize_str)


class GrammarCompiler:
    """Compiles for one tokenizer and remembers what it made and what was refused. Safe to use from several threads."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.eos_token_ids = tokenizer.eos_token_ids
        self._tokenizer = tokenizer
        self._vocabulary: LLTokenizer | None = None  # made when first needed
        self._vocabulary_lock = threading.Lock()
        self._cache: OrderedDict[GrammarSpec, CompiledGrammar | ClientError] = OrderedDict()
        self._cache_lock = threading.Lock()

    def token_bytes(self) -> TokenBytes:
        """Return the tokens that it compiles for."""
        return TokenBytes.of(self._tokenizer)

    def piece(self, token_id: int) -> bytes:
        """Return the bytes of one token."""
        return self._tokenizer.token_bytes(token_id)

    def find(self, spec: GrammarSpec) -> CompiledGrammar | None:
        """Return what ``spec`` was compiled to, None if it is not at hand; raises ClientError if it was refused."""
        with self._cache_lock:
            found = self._cache.get(spec)
            if found is not None:
                self._cache.move_to_end(spec)
        if isinstance(found, ClientError):
            raise ClientError(found.message, param=found.param, code=found.code)
        return found

    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        """Return ``spec`` compiled, from the cache if possible. Blocks; raises ClientError that says what is wrong."""
        if (found := self.find(spec)) is not None:
            return found
        try:
            compiled = CompiledGrammar(spec, self.load_vocabulary())
        except ClientError as error:
            self.refuse(spec, error)
            raise
        self._remember(spec, compiled)
        return compiled

    def refuse(self, spec: GrammarSpec, error: ClientError) -> None:
        """Remember that ``spec`` cannot be used."""
        self._remember(spec, error)

    def load_vocabulary(self) -> LLTokenizer:
        """Return the vocabulary as llguidance has it. Building it, once, holds the GIL: 0.3 s for 50,000 tokens."""
        with self._vocabulary_lock:
            if self._vocabulary is None:
                self._vocabulary = build_vocabulary(self.token_bytes(), self._tokenizer.encode_fragment)
            return self._vocabulary

    def _remember(self, spec: GrammarSpec, result: CompiledGrammar | ClientError) -> None:
        with self._cache_lock:
            self._cache[spec] = result
            self._cache.move_to_end(spec)
            while len(self._cache) > MAX_CACHED:
                self._cache.popitem(last=False)


def first_lines(error: str) -> str:
    """Return what is fit for a client: the beginning of llguidance's message, without its picture of the state."""
    text = error.split("\n<")[0].strip()
    return text if len(text) <= MAX_MESSAGE_CHARS else f"{text[:MAX_MESSAGE_CHARS]}..."

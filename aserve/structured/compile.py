"""From a grammar's text to what rows can follow, once for each grammar.

What is compiled is checked first: sizes in ``request.py``, form in ``grammar_text.py``. Compiling blocks, so
callers do it off the event loop.
"""

import threading
from collections import OrderedDict

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask
from numpy.typing import NDArray

from aserve.errors import ClientError
from aserve.request import GrammarSpec
from aserve.structured.grammar_text import to_llguidance
from aserve.structured.vocabulary import build_vocabulary
from aserve.tokenizer.tokenizer import Tokenizer

MAX_CACHED = 512  # grammars, and as many refusals
NOTHING_FITS = "no output of this model can match the grammar"
LIMITS = LLParserLimits(verbose_errors=False)


class CompiledGrammar:
    """A grammar over one vocabulary. Immutable; any number of rows may follow it at once."""

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        """Take over a ``matcher`` at its start. Raises ClientError if no output can begin."""
        self._matcher = matcher
        self.first_mask: NDArray[np.int32] = allocate_token_bitmask(1, vocab_size)[0]  # [ceil(V / 32)]
        fill_next_token_bitmask(matcher, self.first_mask[np.newaxis])
        if matcher.is_stopped() and not matcher.is_accepting():
            raise ClientError(NOTHING_FITS, param="grammar")

    def start(self) -> LLMatcher:
        """Return a matcher of one's own, at the beginning."""
        return self._matcher.deep_copy()


class GrammarCompiler:
    """Compiles for one tokenizer and remembers what it made and what it refused. Safe to use from several threads."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.eos_token_ids = tokenizer.eos_token_ids
        self._tokenizer = tokenizer
        self._vocabulary: LLTokenizer | None = None  # made when first needed
        self._vocabulary_lock = threading.Lock()
        self._cache: OrderedDict[GrammarSpec, CompiledGrammar | ClientError] = OrderedDict()
        self._cache_lock = threading.Lock()

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
            compiled = self._build(spec)
        except ClientError as error:
            self._remember(spec, error)
            raise
        self._remember(spec, compiled)
        return compiled

    def _build(self, spec: GrammarSpec) -> CompiledGrammar:
        text = to_llguidance(spec)
        matcher = LLMatcher(self._load_vocabulary(), text, log_level=0, limits=LIMITS)
        if error := matcher.get_error():
            raise ClientError(f"the {spec.kind} cannot be used: {first_lines(error)}", param="grammar")
        return CompiledGrammar(matcher, self._tokenizer.vocab_size)

    def _load_vocabulary(self) -> LLTokenizer:
        with self._vocabulary_lock:
            if self._vocabulary is None:
                self._vocabulary = build_vocabulary(self._tokenizer)
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
    return text if len(text) <= 500 else f"{text[:500]}..."

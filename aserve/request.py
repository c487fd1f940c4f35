"""What a client asks for and what it gets back, as plain immutable data.

Owns no behaviour beyond checking its own fields; knows nothing of sockets, tensors or the scheduler.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, get_args

from aserve.errors import ClientError

MAX_LOGPROBS = 20
LOWEST_LOGPROB = -9999.0  # stands for minus infinity, which JSON cannot say
MAX_LOGIT_BIAS = 300
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 1024
MAX_GRAMMAR_BYTES = 1 << 17
MAX_INT32 = 2**31 - 1


NUMBER_RANGES: Mapping[str, tuple[float, float]] = {  # field of SamplingParams -> its least and its greatest value
    "temperature": (0.0, 100.0),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (0.01, 100.0),
}
INTEGER_RANGES: Mapping[str, tuple[int, int]] = {
    "top_k": (-1, MAX_INT32),
    "min_tokens": (0, MAX_INT32),
    "max_tokens": (0, MAX_INT32),
    "logprobs": (0, MAX_LOGPROBS),
    "prompt_logprobs": (0, MAX_LOGPROBS),
    "seed": (-(2**63), 2**64 - 1),
}


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


GrammarKind = Literal["json_object", "json_schema", "regex", "lark", "choice", "answer"]


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """What the whole output must match; compiled in ``structured/``.

    ``text`` is the JSON of a schema, a regular expression, a grammar in Lark's notation, the JSON of a list of
    strings to choose from or that of an answer's rules (``structured/answer_rules.py``); it is empty for
    ``json_object``. Raises ClientError with ``param`` "grammar" for a wrong type or size.
    """

    kind: GrammarKind
    text: str = ""

    def __post_init__(self) -> None:
        if self.kind not in get_args(GrammarKind):
            raise ClientError(f"unknown kind of grammar: {self.kind!r}", param="grammar")
        if not isinstance(self.text, str):
            raise ClientError("the text of a grammar must be a string", param="grammar")
        try:
            num_bytes = len(self.text.encode())
        except UnicodeEncodeError:
            raise ClientError("the grammar is not valid Unicode: it holds a lone surrogate", param="grammar") from None
        if num_bytes > MAX_GRAMMAR_BYTES:
            raise ClientError(f"the grammar has {num_bytes} bytes, more than {MAX_GRAMMAR_BYTES}", param="grammar")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are chosen and when it ends.

    Defaults sample from the model's own distribution. ``temperature`` 0 is greedy. ``top_k`` 0 or -1 and ``min_p`` 0
    are off. ``logprobs`` is the number of alternatives reported beside the chosen token, None for no
    report at all; the same holds for ``prompt_logprobs``. ``max_tokens`` None means the rest of the
    context. ``seed`` None takes fresh entropy. ``grammar`` is what the whole output must match. ``stop`` may be given
    as one string or as a list, ``stop_token_ids`` as a list; they are stored as tuples. ``kept_special_ids`` are shown
    although ``skip_special_tokens``, for who reads the text to look for them. Raises ClientError that names the field
    for a wrong type or range.
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    kept_special_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: GrammarSpec | None = None

    def __post_init__(self) -> None:
        for name in ("stop", "stop_token_ids"):
            object.__setattr__(self, name, _as_tuple(getattr(self, name)))  # frozen for everybody else
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            self._check_type(name, getattr(self, name), (bool,), "true or false")
        for name, bounds in NUMBER_RANGES.items():
            self._check_number(name, *bounds)
        for name, limits in INTEGER_RANGES.items():
            self._check_integer(name, *limits)
        self._check_logit_bias()
        self._check_stop()
        if self.grammar is not None:
            self._check_type("grammar", self.grammar, (GrammarSpec,), "a GrammarSpec")

    def _check_number(self, name: str, low: float, high: float) -> None:
        value = getattr(self, name)
        self._check_type(name, value, (float, int), "a number")
        self._check_range(name, value, low, high)

    def _check_integer(self, name: str, low: int, high: int) -> None:
        """None passes where it is the default: it says that the field is not used."""
        value = getattr(self, name)
        if value is None and name in ("max_tokens", "logprobs", "prompt_logprobs", "seed"):
            return
        self._check_type(name, value, (int,), "an integer")
        self._check_range(name, value, low, high)

    @staticmethod
    def _check_type(name: str, value: object, kinds: tuple[type, ...], wanted: str) -> None:
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise ClientError(f"{name} must be {wanted}, got {value!r}", param=name)

    @staticmethod
    def _check_range(name: str, value: float, low: float, high: float) -> None:
        if not low <= value <= high:  # also refuses NaN
            raise ClientError(f"{name} must be between {low:g} and {high:g}, got {value!r}", param=name)

    def _check_logit_bias(self) -> None:
        self._check_type("logit_bias", self.logit_bias, (Mapping,), "a mapping of token ids to numbers")
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise ClientError(f"logit_bias has more than {MAX_LOGIT_BIAS} entries", param="logit_bias")
        for token_id, bias in self.logit_bias.items():
            self._check_type("logit_bias", token_id, (int,), "a mapping of token ids to numbers")
            self._check_type("logit_bias", bias, (float, int), "a mapping of token ids to numbers")
            self._check_range("logit_bias", bias, -100.0, 100.0)

    def _check_stop(self) -> None:
        self._check_type("stop", self.stop, (tuple,), "a string or a list of strings")
        self._check_type("stop_token_ids", self.stop_token_ids, (tuple,), "a list of token ids")
        for token_id in self.stop_token_ids:
            self._check_type("stop_token_ids", token_id, (int,), "a list of token ids")
        if len(self.stop) > MAX_STOP_STRINGS:
            raise ClientError(f"stop has more than {MAX_STOP_STRINGS} entries", param="stop")
        for text in self.stop:
            self._check_type("stop", text, (str,), "a string or a list of strings")
            if not text or len(text) > MAX_STOP_CHARS:
                raise ClientError(f"a stop string must have 1 to {MAX_STOP_CHARS} characters", param="stop")

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise ClientError if a token id named here is outside ``[0, vocab_size)``."""
        for name, ids in (("logit_bias", self.logit_bias), ("stop_token_ids", self.stop_token_ids)):
            if any(not 0 <= token_id < vocab_size for token_id in ids):
                raise ClientError(f"{name} names a token id outside [0, {vocab_size})", param=name)


def _as_tuple(value: Any) -> Any:
    """Return a list as a tuple and a string as a tuple of one; anything else stays, to be refused or taken."""
    if isinstance(value, str):
        return (value,)
    return tuple(value) if isinstance(value, list) else value


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt, already encoded, and how to continue it. Lower ``priority`` runs first."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    priority: int = 0
    arrival_time_s: float = 0.0  # time.monotonic()
    lease: str | None = None  # whose conversation it is: its pages stay locked until the holder's next turn


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log probabilities (natural log) at one position: the chosen token and the most likely ones.

    ``top`` holds ``(token_id, logprob)`` pairs, most likely first; its length is what was asked for.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(slots=True)
class RequestOutput:
    """What is new since the previous output of the same request.

    ``text`` and ``token_ids`` are deltas; counts are totals so far. ``token_ids`` and ``logprobs`` may
    run ahead of ``text`` while a character or a possible stop string is held back. The last
    output carries ``finish_reason``. ``stop_reason`` is the stop string or token id that matched.
    ``token_ends`` says where in ``text`` that of each token ends; None for one token, whose text it is, or none.
    """

    request_id: str
    text: str
    token_ids: list[int]
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None  # first output only; position 0 is None
    token_ends: list[int] | None = None

    def ends(self) -> list[int]:
        """Return where in ``text`` that of each token ends."""
        return [len(self.text)] * len(self.token_ids) if self.token_ends is None else self.token_ends

    def merge(self, later: "RequestOutput") -> None:
        """Append ``later``, so that a slow consumer finds one output where there were two.

        Lists grow in place and may be taken over from ``later``: whoever merges owns both outputs.
        """
        start = len(self.text)
        if self.token_ends is None:
            self.token_ends = self.ends()
        if later.token_ends is None:  # nearly always, one token
            self.token_ends += [start + len(later.text)] * len(later.token_ids)
        else:
            self.token_ends += [start + end for end in later.token_ends]
        self.text += later.text
        self.token_ids.extend(later.token_ids)
        if self.logprobs is None:
            self.logprobs = later.logprobs
        elif later.logprobs:
            self.logprobs.extend(later.logprobs)
        self.prompt_logprobs = self.prompt_logprobs or later.prompt_logprobs
        self.num_output_tokens = later.num_output_tokens
        self.num_cached_tokens = later.num_cached_tokens
        self.finish_reason = later.finish_reason
        self.stop_reason = later.stop_reason

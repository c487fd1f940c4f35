"""Text to token ids and back, one function for all endpoints; safe to call from several threads.

Encoding may take long for long texts, so callers run it off the event loop; the library below
releases the GIL. Detokenizers are cheap and are made for the loop.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import tokenizers

from aserve.errors import ClientError, ContextLengthError
from aserve.tokenizer.chat_template import ChatTemplate, PromptTooLongError
from aserve.tokenizer.control_tokens import ControlToken, ControlTokens, check_text
from aserve.tokenizer.detokenizer import Detokenizer, make_detokenizer
from aserve.tokenizer.spans import Span, join_spans, make_span, match_spans
from aserve.tokenizer.token_table import SPACE_MARK, build_token_table

MAX_CHARS = 64 << 20  # of a prompt when no other limit is given
PARTS_AT_ONCE = 1024  # handed to the library in one call, which holds the GIL at its beginning and end
MAX_COMPOSED = 1.5  # characters that normalisation makes into one byte: at most three into two bytes, as in U+01D6


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerSettings:
    """What a checkpoint says about its vocabulary besides the vocabulary itself.

    ``vocab_size`` is the number of the model's embedding rows. ``prefix_ids`` and ``suffix_ids`` go around a raw
    prompt, as with BOS. ``prefix_space`` asks for a space mark before a text that starts without a space.
    """

    vocab_size: int
    bos_token_id: int | None = None
    eos_token_ids: frozenset[int] = frozenset()
    prefix_ids: tuple[int, ...] = ()
    suffix_ids: tuple[int, ...] = ()
    prefix_space: bool = False
    templates: Mapping[str, str] = field(default_factory=dict)  # name -> source
    template_variables: Mapping[str, str] = field(default_factory=dict)


class Tokenizer:
    """One vocabulary. ``vocab_size`` counts the model's rows, ``num_tokens`` the ids that have a token."""

    def __init__(self, backend: tokenizers.Tokenizer, settings: TokenizerSettings) -> None:
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = True  # control tokens are found by ControlTokens, and only there
        self._backend = backend
        self._settings = settings
        self._table = build_token_table(backend, settings.vocab_size)
        self._control_tokens = ControlTokens(_control_tokens(backend))
        self._template = ChatTemplate(settings.templates, settings.template_variables, self._control_tokens)
        self.vocab_size = settings.vocab_size
        self.num_tokens = backend.get_vocab_size(with_added_tokens=True)
        self.bos_token_id = settings.bos_token_id
        self.eos_token_ids = settings.eos_token_ids
        plain = (token.content for token in backend.get_added_tokens_decoder().values() if not token.special)
        self._word_starts = (" ", SPACE_MARK, *plain)  # what takes no space mark at the beginning of a text
        chars_per_byte = MAX_COMPOSED if backend.normalizer is not None else 1.0
        self._max_chars_per_token = self._table.longest_bytes * chars_per_byte

    @property
    def has_chat_template(self) -> bool:
        """Whether messages can be encoded."""
        return self._template.is_usable

    @property
    def chat_template(self) -> str:
        """The sources of the chat templates, joined; empty if there is none."""
        return self._template.source

    @property
    def special_token_ids(self) -> frozenset[int]:
        """The control tokens, which decoding leaves out when asked to."""
        return self._table.special_ids

    def min_tokens_for(self, num_chars: int) -> int:
        """Return how many tokens a text of ``num_chars`` has at least, without looking at it.

        Characters that the vocabulary cannot express, which cost no token, are counted as if they did.
        """
        return -int(-num_chars // self._max_chars_per_token)

    def encode(self, text: str, add_special_tokens: bool = True, *, max_tokens: int | None = None) -> list[int]:
        """Return the ids of a raw prompt; control tokens spelled in it become their ids.

        ``add_special_tokens`` adds BOS where the vocabulary asks for it. Raises ClientError for text that is not
        Unicode and, with code ``context_length_exceeded``, for more than ``max_tokens``.
        """
        limit = _Limit(max_tokens, "prompt")
        limit.check(self.min_tokens_for(len(text)), is_exact=False)
        check_text(text)
        ids = self._encode_marked(text, limit)
        if add_special_tokens:
            ids = self._add_affixes(ids)
        limit.check(len(ids), is_exact=True)
        return ids

    def encode_fragment(self, text: str) -> list[int]:
        """Return the ids of ordinary text that stands within an output; nothing is added, no control token found.

        A normaliser of the vocabulary may still change the text.
        """
        token_ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        return token_ids

    def encode_chat(
        self,
        messages: Sequence[Any],
        *,
        tools: Sequence[Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
        max_tokens: int | None = None,
    ) -> list[int]:
        """Return the ids of the chat template's text for ``messages``, with nothing added.

        Only the template writes control tokens; text in messages, tools and ``template_kwargs``, the template's
        further variables, that spells one stays text.
        ``continue_final_message`` leaves the last message open. Raises ClientError as ``encode`` does, and for
        messages that cannot be rendered.
        """
        spans = self.encode_turn(
            messages,
            (),
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            template_kwargs=template_kwargs,
            max_tokens=max_tokens,
        )
        return join_spans(spans)

    def encode_turn(
        self,
        messages: Sequence[Any],
        known: Sequence[Span],
        *,
        tools: Sequence[Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
        max_tokens: int | None = None,
    ) -> list[Span]:
        """Return the prompt of ``encode_chat`` in spans: those of ``known`` that it begins with, then what is new.

        Where the template writes something else than before, the text from there on is tokenized.
        """
        limit = _Limit(max_tokens, "messages")
        limit.check(len(messages), is_exact=False)  # none is rendered as less than a token
        max_chars = MAX_CHARS if max_tokens is None else int(max_tokens * self._max_chars_per_token)
        try:
            text = self._template.render(
                messages,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                max_chars=max_chars,
                kwargs=template_kwargs,
            )
        except PromptTooLongError:
            raise limit.exceeded(self.min_tokens_for(max_chars + 1), is_exact=False) from None
        spans, end = match_spans(text, known)
        if end < len(text):
            ids = self._encode_marked(text[end:], limit, num_before=sum(len(span.token_ids) for span in spans))
            spans.append(make_span(text[end:], ids))
        return spans

    def written_span(self, text: str, token_ids: Sequence[int]) -> Span:
        """Return the span of what a model wrote: ``text`` as it was shown, and its ids, the ending EOS included."""
        ends = bool(token_ids) and token_ids[-1] in self.eos_token_ids
        ending = self.token_bytes(token_ids[-1]).decode(errors="replace") if ends else ""
        return make_span(text + ending, token_ids)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of ``token_ids``; ids without a token add nothing."""
        return self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def detokenizer(self, skip_special_tokens: bool = True, kept_special_ids: tuple[int, ...] = ()) -> Detokenizer:
        """Return the state of one stream whose joined deltas equal ``decode`` of all its ids.

        ``kept_special_ids`` are shown although ``skip_special_tokens``.
        """
        return make_detokenizer(self._table, skip_special_tokens, kept_special_ids)

    def special_ids_of(self, texts: Iterable[str]) -> tuple[int, ...]:
        """Return the ids of those ``texts`` that are control tokens."""
        return self._control_tokens.ids_of(texts)

    def token_bytes(self, token_id: int) -> bytes:
        """Return a token's own bytes, which may be part of a character; empty for an id without a token."""
        return self._table.pieces[token_id] if 0 <= token_id < len(self._table.pieces) else b""

    def _encode_marked(self, text: str, limit: "_Limit", num_before: int = 0) -> list[int]:
        """Return the ids of ``text``, before which ``num_before`` tokens stand."""
        parts = self._control_tokens.split(text)
        if self._settings.prefix_space and not num_before and parts and isinstance(parts[0], str):
            parts[0] = parts[0] if parts[0].startswith(self._word_starts) else SPACE_MARK + parts[0]
        ids: list[int] = []
        for start in range(0, len(parts), PARTS_AT_ONCE):
            batch = parts[start : start + PARTS_AT_ONCE]
            pieces = [part for part in batch if isinstance(part, str)]
            encodings = self._backend.encode_batch_fast(pieces, add_special_tokens=False)  # releases the GIL
            num_tokens = num_before + len(ids) + sum(map(len, encodings)) + len(batch) - len(pieces)
            limit.check(num_tokens, is_exact=start + len(batch) == len(parts))
            encoded = iter(encodings)
            for part in batch:
                ids.extend(next(encoded).ids if isinstance(part, str) else (part,))
        self._check_rows(ids)
        return ids

    def _add_affixes(self, ids: list[int]) -> list[int]:
        """Add what goes around a raw prompt, unless the prompt's own text begins with BOS already."""
        prefix, suffix = self._settings.prefix_ids, self._settings.suffix_ids
        if prefix and tuple(ids[: len(prefix)]) == prefix:
            prefix = ()
        return [*prefix, *ids, *suffix]

    def _check_rows(self, ids: Iterable[int]) -> None:
        """Refuse tokens that were added to the vocabulary but not to the model."""
        if len(self._table.pieces) > self.vocab_size and (missing := [i for i in ids if i >= self.vocab_size]):
            token = self._backend.id_to_token(missing[0])
            raise ClientError(f"the model has no embedding for the token {token!r}")


@dataclass(frozen=True, slots=True)
class _Limit:
    """The most tokens that a prompt may have, None for any number, and the field of the request that it came in."""

    max_tokens: int | None
    param: str

    def check(self, num_tokens: int, is_exact: bool) -> None:
        if self.max_tokens is not None and num_tokens > self.max_tokens:
            raise self.exceeded(num_tokens, is_exact)

    def exceeded(self, num_tokens: int, is_exact: bool) -> ClientError:
        return ContextLengthError(num_tokens, self.max_tokens, param=self.param, is_exact=is_exact)


def _control_tokens(backend: tokenizers.Tokenizer) -> Iterable[ControlToken]:
    for token_id, token in backend.get_added_tokens_decoder().items():
        if token.special:
            yield ControlToken(token_id, token.content, token.lstrip, token.rstrip)

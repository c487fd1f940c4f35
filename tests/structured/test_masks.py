"""Masks against the whole vocabulary, token by token: Python's ``regex`` says what can still become a match."""

import random

import numpy as np
import pytest
import regex
from doubles_http import demo_tokenizer
from doubles_structured import EOS, allowed, demo_compiler
from llguidance import LLMatcher

from aserve.request import GrammarSpec

PATTERNS = [
    r"[a-c]{3}-[0-9]+",
    r"(yes|no|maybe)( indeed)?",
    r"\{ ?\"a\" ?: ?(true|false|null) ?\}",
    r"(ab|a)+c?",
    r"[A-Z][a-z]{0,12}( [A-Z][a-z]{0,12}){1,3}",
    r"-?(0|[1-9][0-9]{0,5})(\.[0-9]{1,3})?",
]


def can_continue(pattern: "regex.Pattern[str]", text: bytes) -> bool:
    """Whether some text that begins with ``text`` matches."""
    try:
        return pattern.fullmatch(text.decode(), partial=True) is not None
    except UnicodeDecodeError:  # the patterns are ASCII
        return False


@pytest.mark.parametrize("text", PATTERNS)
def test_a_mask_allows_exactly_the_tokens_that_can_still_become_a_match(text: str) -> None:
    tokenizer, pattern, rng = demo_tokenizer(), regex.compile(text), random.Random(text)
    special = tokenizer.special_token_ids
    pieces = {i: tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size) if i not in special}
    ascii_pieces = {i: piece for i, piece in pieces.items() if piece and piece.isascii()}
    compiled = demo_compiler().compile(GrammarSpec("regex", text))
    matcher, written = compiled.start(), b""
    mask = allowed(compiled.first_mask)
    num_compared = 0
    for _ in range(12):
        right = {i for i, piece in ascii_pieces.items() if can_continue(pattern, written + piece)}
        if pattern.fullmatch(written.decode()):
            right.add(EOS)
        next_bytes = {pieces[i][:1] for i in right - {EOS}}
        is_forced = len(mask) == 1 and len(next_bytes) == 1 and EOS not in right
        assert mask <= right if is_forced else mask == right, written  # where one text can follow, so does one token
        num_compared += not is_forced
        going_on = sorted(mask - {EOS})
        if not going_on:
            assert matcher.is_accepting()
            break
        token_id = rng.choice(going_on)
        written += pieces[token_id]
        assert matcher.consume_token(token_id)
        mask = {i for i in allowed_now(matcher) if i < tokenizer.vocab_size}
    assert num_compared >= 2


def allowed_now(matcher: LLMatcher) -> set[int]:
    return allowed(np.frombuffer(matcher.compute_bitmask(), np.int32))


def test_control_tokens_are_not_text() -> None:
    """A grammar for their spelling is met by ordinary tokens only."""
    spelling = "<|im_start|>"
    compiled = demo_compiler().compile(GrammarSpec("choice", f'["{spelling}"]'))
    matcher, written = compiled.start(), b""
    while not matcher.is_stopped():
        token_ids = allowed_now(matcher)
        assert not token_ids & demo_tokenizer().special_token_ids
        token_id = min(token_ids)
        written += demo_tokenizer().token_bytes(token_id)
        assert matcher.consume_token(token_id)
    assert written.decode() == spelling


def test_forced_text_is_cut_as_the_model_learned_to() -> None:
    text = "The quick brown fox jumps over the lazy dog; Příliš žluťoučký kůň."
    matcher = demo_compiler().compile(GrammarSpec("choice", f'["{text}"]')).start()
    token_ids = []
    while not matcher.is_stopped():
        (token_id,) = allowed_now(matcher)
        token_ids.append(token_id)
        matcher.consume_token(token_id)
    assert token_ids == demo_tokenizer().encode(text)


def test_long_forced_text_is_written_to_its_end() -> None:
    text = "abc def " * 700
    matcher = demo_compiler().compile(GrammarSpec("choice", f'["{text}"]')).start()
    written = b""
    while not matcher.is_stopped():
        token_id = min(allowed_now(matcher))
        written += demo_tokenizer().token_bytes(token_id)
        matcher.consume_token(token_id)
    assert written.decode() == text


def test_white_space_in_json_is_one_space_at_most() -> None:
    tokenizer = demo_tokenizer()
    compiled = demo_compiler().compile(GrammarSpec("json_object"))
    for text, is_right in {
        '{"a": [1, 2], "b": {}}': True,
        '{"a":[1,2],"b":{}}': True,
        '{ "a" : [ 1 , 2 ] }': True,
        '{"a":  1}': False,
        '{\n"a": 1}': False,
        ' {"a": 1}': False,
        '{"a": 1} ': False,
    }.items():
        token_ids = tokenizer.encode(text)
        assert (compiled.start().validate_tokens(token_ids) == len(token_ids)) is is_right, text

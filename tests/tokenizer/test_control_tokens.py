"""Finding control tokens, and keeping message text from spelling one."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aserve.errors import ClientError
from aserve.tokenizer.control_tokens import MARK, ControlToken, ControlTokens, unmark, unmark_all
from aserve.tokenizer.tokenizer import Tokenizer

TEXTS = ["<|a|>", "<|ab|>", "<|a", "[x]", "x][", "||", "<s>", "s>x", "ěš"]
TOKENS = ControlTokens(ControlToken(token_id, text) for token_id, text in enumerate(TEXTS))
ALPHABET = "<|ab>[x]sěš "


def reference_split(text: str) -> list[str | int]:
    """Scan from the left, take the longest token at each place."""
    parts: list[str | int] = []
    piece, position = "", 0
    while position < len(text):
        found = [token for token in TEXTS if text.startswith(token, position)]
        if found:
            token = max(found, key=len)
            parts += [piece] * bool(piece) + [TEXTS.index(token)]
            piece, position = "", position + len(token)
        else:
            piece, position = piece + text[position], position + 1
    return parts + [piece] * bool(piece)


@settings(max_examples=400, deadline=None)
@given(text=st.text(ALPHABET, max_size=40))
def test_split_takes_the_leftmost_longest(text: str) -> None:
    assert TOKENS.split(text) == reference_split(text)


@settings(max_examples=400, deadline=None)
@given(text=st.text(ALPHABET, max_size=40))
def test_marked_text_holds_no_control_token_and_comes_back_whole(text: str) -> None:
    marked = TOKENS.mark(text)
    assert unmark(marked) == text
    assert TOKENS.split(marked) == ([text] if text else [])
    assert (marked == text) == (not has_token_or_beginning(text))


def has_token_or_beginning(text: str) -> bool:
    beginnings = [token[:n] for token in TEXTS for n in range(1, len(token))]
    return any(token in text for token in TEXTS) or any(text.endswith(beginning) for beginning in beginnings)


@settings(max_examples=400, deadline=None)
@given(said=st.lists(st.text(ALPHABET, max_size=12), max_size=5))
def test_no_control_token_forms_where_marked_texts_meet(said: list[str]) -> None:
    joined = "".join(TOKENS.mark(text) for text in said)
    assert [part for part in TOKENS.split(joined) if isinstance(part, int)] == []
    assert "".join(map(str, TOKENS.split(joined))) == "".join(said)


def test_the_template_s_own_tokens_stay() -> None:
    marked = TOKENS.mark("hi <|a|> <")
    assert TOKENS.split(f"<|a|>{marked}|ab|><|ab|>") == [0, "hi <|a|> <|ab|>", 1]


def test_marks_survive_what_templates_do_to_text() -> None:
    marked = TOKENS.mark("  <|a|> x [x] <  ")
    for changed in (marked.strip(), marked.upper().lower(), f"{marked}", "".join(marked.split(" ")), marked[2:]):
        assert not [part for part in TOKENS.split(changed) if isinstance(part, int)]
    assert unmark(TOKENS.mark("  <|a|>  ").strip()) == "<|a|>"


def test_nested_values() -> None:
    value = {"<s>": ["<|a|>", 1, None, True, {"k": ("[x]",)}]}
    marked = TOKENS.mark_all(value)
    assert MARK in next(iter(marked))
    assert unmark_all(marked) == {"<s>": ["<|a|>", 1, None, True, {"k": ["[x]"]}]}


def test_white_space_that_a_token_swallows() -> None:
    tokens = ControlTokens([ControlToken(7, "<l>", lstrip=True), ControlToken(8, "<r>", rstrip=True)])
    assert tokens.split("a \n\u3000<l> b <r>\t c") == ["a", 7, " b ", 8, "c"]
    assert tokens.split(" <l><r> ") == [7, 8]


def test_without_control_tokens() -> None:
    none = ControlTokens([])
    assert none.split("<s>") == ["<s>"]
    assert none.mark("<s>") == "<s>"


def test_a_token_of_one_character_is_ordinary_text() -> None:
    assert ControlTokens([ControlToken(1, "x"), ControlToken(2, "")]).split("axb") == ["axb"]


@pytest.mark.parametrize("text", ["\ud800", "a\udfffb", MARK, f"<{MARK}|a|>"])
def test_lone_surrogates_are_refused(text: str) -> None:
    with pytest.raises(ClientError, match="not valid Unicode"):
        TOKENS.mark(text)


@pytest.mark.alone
def test_hostile_text_takes_no_longer_than_its_length_allows(demo_tokenizer: Tokenizer) -> None:
    reserved = ControlTokens(ControlToken(n, f"<|reserved_special_token_{n}|>") for n in range(256))

    def best_time(text: str) -> float:
        times = []
        for _ in range(3):
            start = time.perf_counter()
            reserved.split(reserved.mark(text))
            times.append(time.perf_counter() - start)
        return min(times)

    plain = best_time("<a" * 100_000)
    assert best_time("<|reserved_special_token_" * 8000) < 20 * plain
    assert best_time("<" * 200_000) < 20 * plain

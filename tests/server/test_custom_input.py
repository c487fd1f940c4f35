"""The free text of a custom tool is read out of JSON that arrives in pieces, checked against the json module."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aserve.server.responses.custom_input import CustomInput, decode_string

SPOKEN = 'a "q" \\ / \n\t \xe9 \U0001f600 \x7f }'
WRITTEN = [
    json.dumps({"input": SPOKEN}),
    json.dumps({"input": SPOKEN}, ensure_ascii=False),
    json.dumps({"input": SPOKEN}, indent=2),
    '{"input":"' + json.dumps(SPOKEN)[1:-1].replace("\\n", "\n") + '"}',  # a raw line end, as models write
    json.dumps({"why": "x" * 100, "input": SPOKEN}),
    json.dumps({"input": SPOKEN, "why": "}"}),
]


def read(pieces: list[str]) -> tuple[str, str]:
    """Return what was shown before the end, and all of it."""
    reader = CustomInput()
    shown = "".join(reader.push(piece) for piece in pieces)
    return shown, shown + reader.flush()


@pytest.mark.parametrize("written", WRITTEN)
def test_any_cut_gives_the_same_text(written: str) -> None:
    for place in range(len(written) + 1):
        assert read([written[:place], written[place:]])[1] == SPOKEN
    for size in (1, 2, 3):
        shown, text = read([written[start : start + size] for start in range(0, len(written), size)])
        assert text == SPOKEN
        assert shown == ("" if "why" in written[:20] else SPOKEN)


@given(st.text(), st.integers(1, 7), st.booleans())
def test_any_text_comes_back(text: str, size: int, is_ascii: bool) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        return
    written = json.dumps({"input": text}, ensure_ascii=is_ascii)
    assert read([written[start : start + size] for start in range(0, len(written), size)])[1] == text


def test_what_is_shown_never_runs_ahead() -> None:
    reader = CustomInput()
    assert reader.push('{"input": "ab\\') == "ab"
    assert reader.push("ud83d") == ""
    assert reader.push("\\ude0") == ""
    assert reader.push("0\\") == "\U0001f600"
    assert (reader.push('"'), reader.is_over) == ('"', False)
    assert (reader.push('"} and more'), reader.is_over) == ("", True)
    assert reader.flush() == ""


@pytest.mark.parametrize("written", WRITTEN)
def test_whatever_is_cut_is_known_not_to_be_whole(written: str) -> None:
    ends = next(end for end in range(len(written) + 1) if read([written[:end]])[1] == SPOKEN)
    for end in range(1, len(written) + 1):
        reader = CustomInput()
        reader.push(written[:end])
        for has_stopped in (False, True):
            assert reader.is_whole(has_stopped=has_stopped) is (
                end > ends if "why" not in written[:20] else end == len(written)
            )
    plain = CustomInput()
    plain.push("just text")
    assert (plain.is_whole(has_stopped=False), plain.is_whole(has_stopped=True)) == (False, True)


@pytest.mark.parametrize(
    ("written", "text"),
    [
        ("just text", "just text"),
        ('{"patch": "x"}', '{"patch": "x"}'),
        ('{"input": 5}', '{"input": 5}'),
        ("", ""),
        ('{"input": "cut', "cut"),
        ('{"input": "cut\\', "cut\\"),
        ('{"input": "\\ud83d!"}', "?!"),  # half of a pair is no character
        ('{"input": "\\ud83d"}', "?"),
    ],
)
def test_what_is_not_that_object_stays_as_it_is(written: str, text: str) -> None:
    for size in (1, 4, 100):
        assert read([written[start : start + size] for start in range(0, len(written), size)])[1] == text


def test_strings_that_json_cannot_decode_stay_as_they_are() -> None:
    assert decode_string("C:\\dir \\n") == "C:\\dir \\n"

"""Stop strings: nothing of one is shown, nothing else is lost, and time grows with the text only."""

import time
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aserve.tokenizer.stop_strings import StopStringFilter
from aserve.tokenizer.tokenizer import Tokenizer


def run(pushes: Sequence[str], stops: Sequence[str]) -> tuple[list[str], str | None]:
    """Return (what each push and then the flush showed, the match)."""
    stop_filter = StopStringFilter(stops)
    shown = []
    for text in pushes:
        visible, matched = stop_filter.push(text)
        assert matched == stop_filter.matched
        shown.append(visible)
    return [*shown, stop_filter.flush()], stop_filter.matched


def reference(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    """Return (visible text, match): the stop that is complete first, the longest of those that end together."""
    ends = [(text.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    if not ends:
        return text, None
    end, _, stop = min(ends)
    return text[: end - len(stop)], stop


def longest_hold(text: str, stops: Sequence[str]) -> int:
    return max((n for stop in stops for n in range(len(stop)) if text.endswith(stop[:n])), default=0)


@pytest.mark.parametrize(
    ("pushes", "stops", "shown", "matched"),
    [
        # the checks of cases.md B03, in order
        (["DEF", "GH", "I", "J"], ["DEFGHIJ"], ["", "", "", "", ""], "DEFGHIJ"),
        (["UNO DUE ", "TRE"], ["TRE\nAAAA"], ["UNO DUE ", "", "TRE"], None),
        (["one, ", "two", ", three", ", four"], ["two"], ["one, ", "", "", "", ""], "two"),
        (["xxs", "topyy"], ["stop"], ["xx", "", ""], "stop"),
        (["ab", "c"], ["ab", "abc"], ["", "", ""], "ab"),
        (["abc"], ["abc", "ab"], ["", ""], "ab"),
        (["a\U0001f600", "b"], ["\U0001f600b"], ["a", "", ""], "\U0001f600b"),
        (["stop"], ["stop"], ["", ""], "stop"),
        # more of the kind
        (["xab"], ["ab", "xab"], ["", ""], "xab"),
        (["aaa", "ab"], ["aaab"], ["", "a", ""], "aaab"),
        (["abab", "ac"], ["abac"], ["ab", "", ""], "abac"),
        (["no", "thing"], ["###"], ["no", "thing", ""], None),
        (["", "a", ""], ["a"], ["", "", "", ""], "a"),
        (["anything"], [], ["anything", ""], None),
    ],
)
def test_what_is_shown(pushes: list[str], stops: list[str], shown: list[str], matched: str | None) -> None:
    assert run(pushes, stops) == (shown, matched)


@settings(max_examples=400, deadline=None)
@given(
    text=st.text("abc\u0301\U0001f600", max_size=30),
    cuts=st.lists(st.integers(0, 30), max_size=6),
    stops=st.lists(st.text("abc\U0001f600", min_size=1, max_size=5), max_size=4),
)
def test_cuts_do_not_matter_and_the_hold_is_as_short_as_can_be(text: str, cuts: list[int], stops: list[str]) -> None:
    borders = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    stop_filter, shown = StopStringFilter(stops), ""
    for start, end in pairwise(borders):
        shown += stop_filter.push(text[start:end])[0]
        if stop_filter.matched is None:
            assert len(shown) == end - longest_hold(text[:end], stops)
    assert (shown + stop_filter.flush(), stop_filter.matched) == reference(text, stops)


def test_a_flushed_filter_starts_anew() -> None:
    stop_filter = StopStringFilter(["abc"])
    stop_filter.push("ab")
    assert (stop_filter.flush(), stop_filter.push("c a"), stop_filter.flush()) == ("ab", ("c ", None), "a")


def test_with_the_detokenizer(demo_tokenizer: Tokenizer) -> None:
    # U+1F600 is three tokens; the stop string starts before it and ends inside the next token
    ids = demo_tokenizer.encode("wait \U0001f600 there is more")
    detokenizer, stop_filter = demo_tokenizer.detokenizer(), StopStringFilter(["\U0001f600 th"])
    shown = [stop_filter.push(detokenizer.push([token_id]))[0] for token_id in ids]
    assert "".join(shown) + stop_filter.flush() == "wait "
    assert stop_filter.matched == "\U0001f600 th"


# The worst that a request may carry: 16 stops of 1,024 characters, and text that keeps almost matching.
HOSTILE_STOPS = ["a" * (1024 - n) + "b" * n for n in range(1, 17)]


def best_time(stops: Sequence[str], pushes: Sequence[str]) -> float:
    best = float("inf")
    for _ in range(5):
        stop_filter = StopStringFilter(stops)
        start = time.perf_counter()
        for text in pushes:
            stop_filter.push(text)
        best = min(best, time.perf_counter() - start)
    return best


@pytest.mark.alone
def test_time_is_linear_in_the_text_whatever_the_stops() -> None:
    pushes = ["a" * 4] * 4000
    simple = best_time(["ab"], pushes)
    hostile = best_time(HOSTILE_STOPS, pushes)
    falling_back = best_time(HOSTILE_STOPS, ["aaab"] * 4000)
    assert hostile < 6 * simple  # a search at each position would take hundreds of times as long
    assert falling_back < 12 * simple
    assert best_time(HOSTILE_STOPS, pushes * 4) < 8 * hostile


def test_building_the_largest_filter_stays_within_a_loop_turn() -> None:
    small = min(_build_time(["a" * 64]) for _ in range(20))
    large = min(_build_time(HOSTILE_STOPS) for _ in range(5))
    assert large < 16 * 16 * 4 * small  # 256 times the characters


def _build_time(stops: Sequence[str]) -> float:
    start = time.perf_counter()
    StopStringFilter(stops)
    return time.perf_counter() - start


@pytest.mark.alone
def test_text_that_begins_no_stop_costs_next_to_nothing() -> None:
    pushes = [" word"] * 4000

    def floor() -> None:
        for text in pushes:
            _pass_on(text)

    best = float("inf")
    for _ in range(9):
        start = time.perf_counter()
        floor()
        best = min(best, time.perf_counter() - start)
    assert best_time([], pushes) < 5 * best
    assert best_time(["\n\n", "User:", "###"], pushes) < 12 * best


def _pass_on(text: str) -> tuple[str, None]:
    return text, None

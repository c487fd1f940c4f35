"""Tokens to text to outputs: stop strings, held text, endings and counts (cases B03, B04, B10)."""

from dataclasses import dataclass, field

import pytest
from doubles_engine import EOS, LetterTokenizer, RecordingSink, request

from aserve.engine.output_stream import OutputStream
from aserve.metrics import Metrics
from aserve.request import FinishReason, TokenLogprobs
from aserve.scheduler.delta import SequenceDelta

LENGTH, STOP = FinishReason.LENGTH, FinishReason.STOP


def delta(tokens, finish=None, stop_token=None, logprobs=None, error=None):
    token_ids = [token if isinstance(token, int) else ord(token) for token in tokens]
    return SequenceDelta("r", token_ids, 0, logprobs, finish_reason=finish, stop_token_id=stop_token, error=error)


@dataclass
class Played:
    """What came of one stream."""

    sink: RecordingSink = field(default_factory=RecordingSink)
    metrics: Metrics = field(default_factory=Metrics)
    stopped_at: int | None = None  # the piece at which the stream asked for the sequence's end

    @property
    def last(self):
        return self.sink.outputs[-1]

    @property
    def summary(self):
        return self.sink.text, self.last.finish_reason, self.last.stop_reason


def play(pieces, finish=None, stop_token=None, **params):
    """Feed ``pieces``, the last one with ``finish`` and ``stop_token``."""
    played = Played()
    stream = OutputStream(request("r", "p", **params), played.sink, LetterTokenizer(), played.metrics)
    for number, tokens in enumerate(pieces, start=1):
        ending = (finish, stop_token) if number == len(pieces) else (None, None)
        if stream.deliver(delta(tokens, *ending), float(number)):
            played.stopped_at = number
    return played


def test_a_stop_string_over_several_tokens_shows_nothing():
    played = play(["DEF", "GH", "I", "J"], stop=("DEFGHIJ",))
    assert played.summary == ("", STOP, "DEFGHIJ")
    assert played.stopped_at == 4


@pytest.mark.parametrize("finish", [STOP, LENGTH])
def test_what_may_have_become_a_stop_string_is_shown_at_another_end(finish):
    pieces = [*"UNO DUE TRE", [EOS]] if finish is STOP else list("UNO DUE TRE")
    played = play(pieces, finish, EOS if finish is STOP else None, stop=("TRE\nAAAA",))
    assert played.summary == ("UNO DUE TRE", finish, None)
    assert played.last.num_output_tokens == len(pieces)
    assert played.stopped_at is None


def test_text_after_the_stop_is_not_shown_and_tokens_after_it_do_not_count():
    played = play([*"one, tw", "o, th", "ree"], stop=("two",))
    assert played.summary == ("one, ", STOP, "two")
    assert played.last.num_output_tokens == len("one, two")
    assert played.sink.token_ids == list(map(ord, "one, two"))
    assert len(played.sink.outputs) == 8  # the delta that came after the stop is dropped


@pytest.mark.parametrize(("include", "text"), [(False, "x"), (True, "xab")])
def test_the_stop_string_itself_is_shown_if_asked_for(include, text):
    played = play(["x", "abc"], stop=("abc", "ab"), include_stop_str_in_output=include)
    assert played.summary == (text, STOP, "ab")


def test_a_stop_string_in_the_prompt_does_not_fire():
    assert play(["q", "q"], LENGTH, stop=("p",)).summary == ("qq", LENGTH, None)


def test_a_stop_equal_to_the_first_token():
    played = play(["a", "b"], stop=("a",))
    assert played.summary == ("", STOP, "a")
    assert played.last.num_output_tokens == 1


def test_a_stop_string_wins_over_the_length_that_ends_with_it():
    played = play(["a", "b"], LENGTH, stop=("b",))
    assert played.summary == ("a", STOP, "b")
    assert played.stopped_at is None  # the scheduler has ended the request itself


def test_stop_strings_do_not_fire_within_min_tokens():
    assert play([*"stop", *"stop"], stop=("stop",), min_tokens=4).summary == ("stop", STOP, "stop")
    assert play([*"stop", *"xop"], LENGTH, stop=("pxo",), min_tokens=4).summary == ("stopxop", LENGTH, None)


@pytest.mark.parametrize(
    ("params", "text"),
    [
        ({}, "ab"),
        ({"include_stop_str_in_output": True}, "ab"),
        ({"skip_special_tokens": False}, "ab"),
        ({"skip_special_tokens": False, "include_stop_str_in_output": True}, "ab<eos>"),
        ({"stop_token_ids": (EOS,)}, "ab"),
        ({"stop": ("zz",)}, "ab"),
    ],
)
def test_the_ending_eos_is_shown_only_when_everything_asks_for_it(params, text):
    played = play(["a", "b", [EOS]], STOP, EOS, **params)
    assert played.summary == (text, STOP, EOS if "stop_token_ids" in params else None)
    assert played.last.num_output_tokens == 3
    assert played.sink.token_ids[-1] == EOS


@pytest.mark.parametrize(("include", "text"), [(False, "a"), (True, "ab")])
def test_a_stop_token_is_shown_if_asked_for(include, text):
    played = play(["a", "b"], STOP, ord("b"), stop_token_ids=(ord("b"),), include_stop_str_in_output=include)
    assert played.summary == (text, STOP, ord("b"))


def test_eos_in_the_middle_is_text_like_any_other_special_token():
    assert play(["a", [EOS], "b"], LENGTH, ignore_eos=True).sink.text == "ab"
    assert play(["a", [EOS], "b"], LENGTH, ignore_eos=True, skip_special_tokens=False).sink.text == "a<eos>b"


def test_logprobs_stay_with_their_tokens_up_to_the_stop():
    sink = RecordingSink()
    stream = OutputStream(request("r", "p", stop=("b",), logprobs=1), sink, LetterTokenizer(), Metrics())
    logprobs = [TokenLogprobs(ord(letter), -1.0) for letter in "abc"]
    assert stream.deliver(delta("abc", logprobs=logprobs), 1.0)
    assert sink.outputs[0].logprobs == logprobs[:2]
    assert sink.token_ids == [97, 98]


def test_a_failed_row_ends_with_its_message():
    sink, metrics = RecordingSink(), Metrics()
    stream = OutputStream(request("r", "p"), sink, LetterTokenizer(), metrics)
    stream.deliver(delta("a"), 1.0)
    stream.deliver(delta("", FinishReason.ERROR, error="all scores are NaN"), 2.0)
    stream.abort(3.0)
    assert str(sink.error) == "all scores are NaN"
    assert metrics.finished[FinishReason.ERROR] == 1


@pytest.mark.parametrize(
    ("finish", "stop_token", "params", "text", "ends"),
    [
        (None, None, {}, "one", [1, 2, 3]),
        (STOP, EOS, {}, "one", [1, 2, 3, 3]),
        (LENGTH, None, {"stop": ("next",)}, "one", [1, 1, 3]),
        (LENGTH, None, {"stop": ("e",)}, "on", [1, 2, 2]),
    ],
)
def test_it_is_known_where_the_text_of_each_of_several_tokens_ends(finish, stop_token, params, text, ends):
    played = play(["one" if stop_token is None else [*"one", EOS]], finish, stop_token, **params)
    assert (played.sink.text, played.last.ends()) == (text, ends)


def test_times_and_counts_reach_the_metrics():
    sink, metrics = RecordingSink(), Metrics()
    stream = OutputStream(request("r", "pqr"), sink, LetterTokenizer(), metrics)
    stream.note_start(0.001)
    stream.note_start(5.0)  # a restart after preemption
    for number, now in enumerate((0.02, 0.024, 0.03)):
        stream.deliver(delta("a", LENGTH if number == 2 else None), now)
    assert (metrics.num_prompt_tokens, metrics.num_generation_tokens) == (3, 3)
    assert metrics.time_to_first_token.total == pytest.approx(0.02)
    assert metrics.inter_token.num_observed == 2
    assert metrics.inter_token.total == pytest.approx(0.01)
    assert metrics.queue_time.total == pytest.approx(0.001)
    assert metrics.end_to_end.total == pytest.approx(0.03)
    assert metrics.finished[LENGTH] == 1

"""Rows follow their grammars independently; minimum lengths, ends and failures are those of one row."""

import numpy as np
import pytest
from doubles_http import demo_tokenizer
from doubles_structured import EOS, advance, allowed, new_rows, start

from aserve.request import GrammarSpec, TokenLogprobs
from aserve.scheduler.plan import StepTokens

DIGITS = GrammarSpec("regex", "[0-9]{1,30}")
CHOICE = GrammarSpec("choice", '["yes", "no", "maybe so"]')
DEAD = GrammarSpec("regex", "b+a\U00040000")  # the demo's vocabulary has no byte f1


def token(text: str) -> int:
    (token_id,) = demo_tokenizer().encode(text)
    return token_id


def test_a_row_that_was_preempted_goes_on_where_it_was() -> None:
    rows = new_rows()
    rows.start_row(start(0, DIGITS))
    for digit in "123":
        advance(rows, {0: token(digit)})
    rows.start_row(start(1, DIGITS, outputs=tuple(map(token, "123"))))
    assert np.array_equal(rows.masks[0], rows.masks[1])
    rows.start_row(start(2, DIGITS))
    assert EOS in allowed(rows.masks[1])
    assert EOS not in allowed(rows.masks[2])


def test_an_output_that_no_grammar_could_have_made_fails_its_row() -> None:
    rows = new_rows()
    rows.start_row(start(0, DIGITS, outputs=(token("x"),)))
    assert 0 in advance(rows, {0: token("1")}).errors


def test_many_rows_at_once_get_the_masks_of_each_alone() -> None:
    together, alone = new_rows(), new_rows()
    for row in range(8):
        grammar = GrammarSpec("regex", f"[0-9]{{{row + 1}}}[a-z]*")
        together.start_row(start(row, grammar))
        alone.start_row(start(row, grammar))
    assert advance(together, dict.fromkeys(range(8), token("7"))).errors == {}
    for row in range(8):
        advance(alone, {row: token("7")})
    assert np.array_equal(together.masks, alone.masks)
    assert len({mask.tobytes() for mask in together.masks}) > 1


def test_a_complete_grammar_ends_its_row_with_its_last_token() -> None:
    rows = new_rows()
    rows.start_row(start(3, CHOICE))
    rows.start_row(start(4, DIGITS))
    step = advance(rows, {4: token("1"), 3: token("no")})
    assert step.ended == [1]
    late = advance(rows, {4: token("2"), 3: EOS})  # row 3 was in flight
    assert (late.errors, late.ended) == ({}, [1])


def test_an_empty_output_ends_by_its_end_token() -> None:
    rows = new_rows()
    rows.start_row(start(0, GrammarSpec("regex", "")))
    assert allowed(rows.masks[0]) == {EOS}
    assert advance(rows, {0: EOS}).ended == [0]


@pytest.mark.parametrize("params", [{"ignore_eos": True}, {"min_tokens": 3}])
def test_the_end_is_ruled_out_only_where_something_else_may_follow(params: dict[str, object]) -> None:
    rows = new_rows()
    rows.start_row(start(0, GrammarSpec("regex", "[0-9]{1,2}"), **params))
    step = advance(rows, {0: token("1")})
    assert step.ended == []
    assert EOS not in allowed(rows.masks[0])
    assert allowed(rows.masks[0])
    assert advance(rows, {0: token("2")}).ended == [0]  # the grammar wins over min_tokens


def test_stop_tokens_wait_for_min_tokens_and_the_end_token_does_not_once_it_is_over() -> None:
    rows = new_rows()
    stop = token("5")
    rows.start_row(start(0, DIGITS, min_tokens=2, stop_token_ids=[stop]))
    assert stop not in allowed(rows.masks[0])
    advance(rows, {0: token("1")})
    assert {stop, EOS}.isdisjoint(allowed(rows.masks[0]))
    advance(rows, {0: token("1")})
    assert {stop, EOS} <= allowed(rows.masks[0])


def test_ignore_eos_leaves_stop_tokens_alone() -> None:
    rows = new_rows()
    rows.start_row(start(0, DIGITS, ignore_eos=True, stop_token_ids=[token("5")]))
    advance(rows, {0: token("1")})
    assert token("5") in allowed(rows.masks[0])
    assert EOS not in allowed(rows.masks[0])


def test_a_dead_end_fails_its_row_alone_and_with_the_next_token() -> None:
    rows = new_rows()
    rows.start_row(start(0, DEAD))
    rows.start_row(start(1, DIGITS))
    assert advance(rows, {0: token("b"), 1: token("1")}).errors == {}
    assert advance(rows, {0: token("a"), 1: token("1")}).errors == {}
    step = advance(rows, {0: 17, 1: token("1")})
    assert list(step.errors) == [0]
    assert step.token_ids == [-1, token("1")]
    assert EOS in allowed(rows.masks[1])
    rows.start_row(start(0, DIGITS))  # the row is reused
    assert advance(rows, {0: token("1"), 1: token("1")}).errors == {}


def test_a_grammar_that_does_not_compile_fails_its_row_alone() -> None:
    rows = new_rows()
    rows.start_row(start(0, GrammarSpec("regex", "[")))
    rows.start_row(start(1, DIGITS))
    step = advance(rows, {0: 9, 1: token("1")})
    assert "unclosed character class" in step.errors[0]
    assert step.token_ids == [-1, token("1")]


def test_rows_whose_logits_were_bad_stay_where_they_are() -> None:
    rows = new_rows()
    rows.start_row(start(0, DIGITS))
    before = rows.masks[0].copy()
    step = StepTokens(1, [-1], errors={0: "bad"})
    rows.settle(step, [0], [0])
    assert step.errors == {0: "bad"}
    assert np.array_equal(rows.masks[0], before)


def test_logprobs_of_a_failed_row_are_dropped() -> None:
    rows = new_rows()
    rows.start_row(start(0, GrammarSpec("regex", "[")))
    step = StepTokens(1, [9], logprobs=[TokenLogprobs(9, -1.0)])
    rows.settle(step, [0], [0])
    assert step.logprobs == [None]

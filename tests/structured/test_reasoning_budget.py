"""Reasoning that has used up its tokens is closed by its marker; then the answer goes on, free or by its grammar."""

import json
from typing import Any

import pytest
from doubles_http import demo_tokenizer
from doubles_structured import EOS, advance, allowed, new_rows, start

from aserve.request import GrammarSpec
from aserve.structured.answer_rules import AnswerRules, ReasoningMarkers

THINK = ReasoningMarkers("<think>", "</think>")
OPEN = ReasoningMarkers("<think>", "</think>", True)
FACE = (10813, 242, 218)  # one character


def ids(text: str) -> list[int]:
    return demo_tokenizer().encode(text)


def follow(spec: GrammarSpec, wanted: list[int]) -> list[int]:
    """Return what a model says that wants to say ``wanted``, and does what it must where only one token is allowed."""
    rows = new_rows()
    rows.start_row(start(0, spec))
    said: list[int] = []
    left = list(wanted)
    while left:
        may = allowed(rows.masks[0])
        token = left.pop(0) if left[0] in may else -1
        if token < 0:
            assert len(may) == 1, "neither what it wants nor forced"
            token = may.pop()
        said.append(token)
        step = advance(rows, {0: token})
        assert not step.errors
    return said


def text(token_ids: list[int]) -> str:
    return demo_tokenizer().decode(token_ids, skip_special_tokens=False)


@pytest.mark.parametrize("budget", [1, 2, 5, 11, 12, 13, 40])
@pytest.mark.parametrize("opening", ["", "<think>", " \n<think>\n"])
def test_no_more_than_the_budget_is_thought_and_the_answer_is_free(budget: int, opening: str) -> None:
    thought, answer = ids(" one two three four five six seven eight nine ten eleven twelve"), ids("Hello <think> you")
    assert len(thought) == 12
    markers = THINK if opening else OPEN
    spec = AnswerRules(reasoning=markers, max_reasoning_tokens=budget).spec()
    space = 1 if opening.endswith("\n") else 0  # a token between the markers, too
    said = follow(spec, [*ids(opening), *thought, *ids("</think>"), *answer, 0, EOS])
    num_thought = min(budget - space, len(thought))
    left = [*thought[num_thought:], *ids("</think>")] if num_thought < len(thought) else []  # said as its answer
    expected = [*ids(opening), *thought[:num_thought], *ids("</think>"), *left, *answer, 0, EOS]
    assert said == expected, text(said)


def test_an_answer_without_reasoning_has_no_budget() -> None:
    spec = AnswerRules(reasoning=THINK, max_reasoning_tokens=1).spec()
    for said in ("Hello you and you", " " * 70 + "<think>a b c d", "<thin air and more"):
        assert follow(spec, ids(said)) == ids(said)


@pytest.mark.parametrize("num_begun", [1, 2])
def test_a_marker_that_has_begun_is_completed(num_begun: int) -> None:
    marker = ids("</think>")
    assert len(marker) == 3
    spec = AnswerRules(reasoning=OPEN, max_reasoning_tokens=2 + num_begun).spec()
    said = follow(spec, [*ids("one two"), *marker[:num_begun], *ids(" and more")])
    assert text(said) == "one two</think> and more"


def test_a_character_that_has_begun_is_completed() -> None:
    spec = AnswerRules(reasoning=OPEN, max_reasoning_tokens=1).spec()
    assert text(follow(spec, [*FACE, *ids("more")])) == "\N{GRINNING FACE}</think>more"


def test_a_marker_that_is_a_control_token_is_that_token() -> None:
    markers = ReasoningMarkers("[THINK]", "<|endoftext|>", True)
    spec = AnswerRules(reasoning=markers, max_reasoning_tokens=2, token_ids={"<|endoftext|>": 0}).spec()
    assert follow(spec, ids("one two three")) == [*ids("one two"), 0, *ids(" three")]


@pytest.mark.parametrize("is_harmony", [False, True])
def test_what_follows_is_held_to_its_grammar(is_harmony: bool) -> None:
    fields: dict[str, Any] = {"is_harmony": True} if is_harmony else {"reasoning": THINK}
    answer = ("json_schema", '{"type":"object","properties":{"a":{"type":"integer"}},"required":["a"]}')
    spec = AnswerRules(answer=answer, max_reasoning_tokens=3, **fields).spec()
    opening, closing, final = (
        ("<|channel|>analysis<|message|>", "<|end|>", "<|start|>assistant<|channel|>final<|message|>")
        if is_harmony
        else ("<think>", "</think>", "")
    )
    wanted = [*ids(opening), *ids("one two three"), *ids(closing), *ids(final), *ids('{"a":5}')]
    assert text(follow(spec, wanted)) == f"{opening}one two three{closing}{final}" + '{"a":5}'
    rows = new_rows()
    rows.start_row(start(0, spec, tuple(ids(f"{opening}one two three"))))
    must = ids(closing)
    for token in must:  # of a sequence that enters again after it was preempted, too
        assert allowed(rows.masks[0]) == {token}
        advance(rows, {0: token})
    assert len(allowed(rows.masks[0])) < 100, "the answer begins by its grammar"


def test_several_rows_keep_their_own_budgets() -> None:
    rows = new_rows()
    for row in range(6):
        rules = AnswerRules(reasoning=OPEN, max_reasoning_tokens=row + 1)
        rows.start_row(start(row, rules.spec()))
    word = ids(" one")[0]
    for step in range(1, 6):
        free = {row: word for row in range(6) if row >= step - 1}
        advance(rows, free)
        forced = [row for row in range(6) if len(allowed(rows.masks[row])) == 1]
        assert forced == list(range(step))


def test_the_budget_is_told_in_the_rules() -> None:
    rules = AnswerRules(reasoning=OPEN, max_reasoning_tokens=5)
    assert AnswerRules.of(rules.spec()) == rules
    assert json.loads(rules.spec().text)["max_reasoning_tokens"] == 5

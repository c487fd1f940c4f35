"""The parts of an answer and the deltas between their ends, however the answer is cut."""

import itertools
import json
import random
import re

import pytest
from doubles_parsing import TOOLS, cuts

from aserve.parsing.answer_reader import (
    AnswerDelta,
    AnswerPart,
    AnswerReader,
    CallPart,
    PartEnd,
    ReasoningPart,
    TextPart,
)
from aserve.parsing.deltas import ReasoningDelta, TextDelta, ToolCallArguments, ToolCallStart
from aserve.parsing.registry import AnswerFormat
from aserve.request import FinishReason, RequestOutput

ANSWER = (
    "<think>\nHm, Prague.\n</think>\n\nLet me see.\n"
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Pra } gue", "days": 3}}\n</tool_call>\n'
    '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
)
PARTS = [
    ("reasoning", "Hm, Prague."),
    ("text", "Let me see."),
    ("get_weather", '{"city": "Pra } gue", "days": 3}'),
    ("get_time", "{}"),
]


def new_reader() -> AnswerReader:
    parser = AnswerFormat("hermes", "think").parser(TOOLS)
    assert parser is not None
    return AnswerReader(parser)


def output(text: str, finish_reason: FinishReason | None = None) -> RequestOutput:
    return RequestOutput("r", text, [1], 5, 1, 0, finish_reason)


def content(part: AnswerPart) -> tuple[str, str]:
    if isinstance(part, CallPart):
        return part.name, part.arguments
    return ("text" if isinstance(part, TextPart) else "reasoning"), part.text


def read(pieces: list[str]) -> tuple[AnswerReader, list[AnswerDelta]]:
    reader = new_reader()
    deltas: list[AnswerDelta] = []
    for place, piece in enumerate(pieces):
        deltas += reader.read(output(piece, FinishReason.STOP if place == len(pieces) - 1 else None))
    return reader, deltas


def test_the_parts_are_the_same_however_the_answer_is_cut() -> None:
    for pieces in cuts(ANSWER):
        reader, deltas = read(pieces)
        assert [content(part) for part in reader.parts] == PARTS, pieces
        assert [delta.part for delta in deltas if isinstance(delta, PartEnd)] == reader.parts
        assert (reader.text, reader.reasoning, len(reader.calls)) == ("Let me see.", "Hm, Prague.", 2)
        assert reader.has_whole_calls


def test_deltas_between_two_ends_add_up_to_the_part() -> None:
    _, deltas = read(list(ANSWER))
    part_of = {TextDelta: TextPart, ReasoningDelta: ReasoningPart, ToolCallStart: CallPart, ToolCallArguments: CallPart}
    kinds: set[type] = set()
    text = ""
    for delta in deltas:
        if isinstance(delta, PartEnd):
            assert (kinds, text) == ({type(delta.part)}, content(delta.part)[1])
            kinds, text = set(), ""
        else:
            kinds.add(part_of[type(delta)])
            text += "" if isinstance(delta, ToolCallStart) else delta.text
    assert not kinds


@pytest.mark.parametrize("end", range(ANSWER.index("arguments"), len(ANSWER)))
def test_a_cut_call_is_told_from_a_whole_one(end: int) -> None:
    reader, _ = read([ANSWER[:end]])
    last = reader.calls[-1].arguments if reader.calls else ""
    try:
        is_whole = isinstance(json.loads(last), dict)
    except ValueError:
        is_whole = False
    assert reader.has_whole_calls is is_whole


@pytest.mark.parametrize(
    ("reason", "stop_reason", "is_whole"),
    [
        (FinishReason.STOP, 7, True),
        (FinishReason.STOP, None, True),
        (FinishReason.STOP, "{", False),
        (FinishReason.LENGTH, None, False),
    ],
)
def test_a_call_without_arguments_is_whole_only_if_the_model_ended_it(
    reason: FinishReason, stop_reason: int | str | None, is_whole: bool
) -> None:
    parser = AnswerFormat("harmony", "harmony").parser(TOOLS)
    assert parser is not None
    reader = AnswerReader(parser)
    reader.read(output("<|channel|>commentary to=functions.get_time <|constrain|>json"))
    last = output("<|message|>", reason)
    last.stop_reason = stop_reason
    reader.read(last)
    assert [content(part) for part in reader.parts] == [("get_time", "{}" if is_whole else "")]
    assert reader.has_whole_calls is is_whole


def test_reasoning_tokens_are_counted_and_the_end_comes_once() -> None:
    reader = new_reader()
    for piece in ("<think>", "Hm", ".", "</think>", "Yes"):
        reader.read(output(piece))
    assert reader.num_reasoning_tokens == 2  # the tags are none
    assert [delta.part for delta in reader.end() if isinstance(delta, PartEnd)] == [TextPart("Yes")]
    assert reader.end() == []
    assert reader.parts == [ReasoningPart("Hm."), TextPart("Yes")]


THOUGHTS = {  # parser -> reasoning between bars, which are left out
    "think": "<think>|\nHm, < 5 </thin.\n|</think>\n\nIt is 5, I think.",
    "harmony": (
        "<|channel|>analysis<|message|>|Hm, < 5.|<|end|><|start|>assistant<|channel|>commentary<|message|>So: <|end|>"
        "<|start|>assistant<|channel|>analysis<|message|>|And?|<|end|>"
        "<|start|>assistant<|channel|>final<|message|>It is 5."
    ),
    "cut within": "<think>|Hm, </thin|",
    "no reasoning": "It is <think>5</think>.",
}


def answer_and_thinking(marked: str) -> tuple[str, set[int]]:
    """Return the text, and the places of the characters between bars."""
    pieces = marked.split("|") if not marked.startswith("<|") else re.split(r"(?<=>)\|(?!>)|(?<!<)\|(?=<)", marked)
    places, start = set(), 0
    for index, piece in enumerate(pieces):
        if index % 2:
            places |= set(range(start, start + len(piece)))
        start += len(piece)
    return "".join(pieces), places


@pytest.mark.parametrize("name", THOUGHTS)
def test_reasoning_tokens_are_those_with_text_between_the_markers_however_outputs_are_merged(name: str) -> None:
    answer, thinking = answer_and_thinking(THOUGHTS[name])
    parser_name = name if name == "harmony" else "think"
    dice = random.Random(name)
    for _ in range(200):
        ends = sorted({*dice.choices(range(1, len(answer)), k=dice.randrange(2, 40)), len(answer)})
        spans = list(itertools.pairwise([0, *ends]))
        expected = sum(not thinking.isdisjoint(range(*span)) for span in spans)
        outputs = [output(answer[start:end]) for start, end in spans]
        outputs[-1].finish_reason = FinishReason.STOP
        merged = [outputs.pop(0)]
        for later in outputs:
            if dice.random() < 0.7:
                merged[-1].merge(later)
            else:
                merged.append(later)
        parser = AnswerFormat(None, parser_name).parser()
        assert parser is not None
        reader = AnswerReader(parser)
        for one in merged:
            reader.read(one)
        assert reader.num_reasoning_tokens == expected, [one.text for one in merged]


def test_a_token_without_text_counts_where_the_next_one_does() -> None:
    for piece, count in (("Hm.", 2), ("</think>Yes", 0)):
        parser = AnswerFormat(None, "think").parser(is_open=True)
        assert parser is not None
        reader = AnswerReader(parser)
        reader.read(output(""))  # a part of a character, or a token that is not shown
        assert reader.num_reasoning_tokens == 0
        reader.read(output(piece))
        assert reader.num_reasoning_tokens == count

"""Sampling parameters are checked where they are made."""

import math
from typing import Any

import pytest

from aserve.errors import ClientError
from aserve.request import FinishReason, RequestOutput, SamplingParams, TokenLogprobs


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1), ("temperature", math.nan), ("temperature", math.inf), ("top_p", 1.0001), ("top_p", -0.1),
        ("min_p", -1), ("min_p", 1.1), ("presence_penalty", 2.1), ("frequency_penalty", -2.1),
        ("repetition_penalty", 0.0),
        ("top_k", -2), ("min_tokens", -1), ("max_tokens", -1), ("max_tokens", 2**31), ("logprobs", 21),
        ("prompt_logprobs", 10**6), ("seed", 2**64), ("logit_bias", {1: math.nan}), ("logit_bias", {1: 100.5}),
        ("logit_bias", dict.fromkeys(range(301), 0.0)), ("stop", ("",)), ("stop", ("a",) * 17), ("stop", ("a" * 1025,)),
    ],
)  # fmt: skip
def test_values_out_of_range_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ClientError) as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 2.5), ("max_tokens", True), ("max_tokens", "5"), ("min_tokens", 1.0), ("min_tokens", None),
        ("top_k", 2.0), ("top_k", 2**31), ("prompt_logprobs", 2.0), ("logprobs", True), ("seed", 1.5),
        ("temperature", "1"), ("temperature", None), ("temperature", True), ("top_p", [1]), ("ignore_eos", 1),
        ("skip_special_tokens", None), ("stop", 5), ("stop", None), ("stop", (5,)), ("stop", {"a"}),
        ("stop_token_ids", 5), ("stop_token_ids", "12"), ("stop_token_ids", (1.0,)), ("stop_token_ids", (True,)),
        ("logit_bias", []), ("logit_bias", None), ("logit_bias", {"1": 1.0}), ("logit_bias", {1: "1"}),
    ],
)  # fmt: skip
def test_values_of_a_wrong_type_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ClientError) as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name
    assert name in caught.value.message


def test_one_stop_string_and_lists_are_stored_as_tuples() -> None:
    given: Any = {"stop": "END", "stop_token_ids": [1, 2]}
    assert SamplingParams(**given) == SamplingParams(stop=("END",), stop_token_ids=(1, 2))
    given = {"stop": ["END", "."]}
    assert SamplingParams(**given).stop == ("END", ".")


@pytest.mark.parametrize(
    ("name", "value"),
    [("top_p", 0.0), ("top_k", 10**9), ("top_k", -1), ("seed", -1), ("seed", 2**64 - 1), ("max_tokens", 0)],
)
def test_edges_are_accepted(name: str, value: Any) -> None:
    assert getattr(SamplingParams(**{name: value}), name) == value


@pytest.mark.parametrize("params", [SamplingParams(logit_bias={49152: 1.0}), SamplingParams(stop_token_ids=(-1,))])
def test_token_ids_outside_the_vocabulary_are_refused(params: SamplingParams) -> None:
    with pytest.raises(ClientError, match=r"\[0, 49152\)"):
        params.check_vocabulary(49152)


def test_merged_outputs_read_like_one() -> None:
    first = RequestOutput("r", "a", [1], 3, 1, 0, logprobs=[TokenLogprobs(1, -0.5)])
    first.merge(RequestOutput("r", "bc", [2, 3], 3, 3, 0, FinishReason.STOP, 3, [TokenLogprobs(2, -1.0)]))
    assert (first.text, first.token_ids, first.num_output_tokens) == ("abc", [1, 2, 3], 3)
    assert (first.finish_reason, first.stop_reason) == (FinishReason.STOP, 3)
    assert [entry.token_id for entry in first.logprobs or ()] == [1, 2]


def test_merged_outputs_know_where_the_text_of_each_token_ends() -> None:
    first = RequestOutput("r", "", [1], 3, 1, 0)
    for text, token_ids, ends in (("ab", [2], None), ("cde", [3, 4], [1, 3]), ("f", [], None), ("g", [5], None)):
        first.merge(RequestOutput("r", text, token_ids, 3, 1, 0, token_ends=ends))
    assert (first.text, first.ends()) == ("abcdefg", [0, 2, 3, 5, 7])


def test_merging_costs_the_same_however_much_is_merged_already() -> None:
    first = RequestOutput("r", "a", [1], 3, 1, 0, logprobs=[TokenLogprobs(1, -0.5)])
    token_ids, logprobs = first.token_ids, first.logprobs
    for i in range(3):
        first.merge(RequestOutput("r", "b", [2 + i], 3, 2 + i, 0, logprobs=[TokenLogprobs(2 + i, -1.0)]))
    assert first.token_ids is token_ids
    assert first.logprobs is logprobs  # a copy for every token would make it quadratic
    assert [entry.token_id for entry in logprobs or ()] == [1, 2, 3, 4]
    late = RequestOutput("r", "", [], 3, 0, 0)
    late.merge(RequestOutput("r", "b", [2], 3, 1, 0, logprobs=[TokenLogprobs(2, -1.0)]))
    late.merge(RequestOutput("r", "", [], 3, 1, 0, FinishReason.STOP))
    assert [entry.token_id for entry in late.logprobs or ()] == [2]

"""What one process says is what another hears; the hash tells any two steps apart."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from doubles_engine import LIMITS

from aserve.config import EngineConfig
from aserve.distributed.messages import (
    Close,
    Execute,
    Executed,
    Failed,
    Order,
    Prepared,
    PrepareGrammar,
    Ready,
    Report,
    Setup,
    Started,
    WarmUp,
    decode_order,
    decode_report,
    encode,
)
from aserve.distributed.step_digest import StepDigest
from aserve.model_files import ModelFiles
from aserve.request import GrammarSpec, SamplingParams
from aserve.scheduler.plan import RowStart, StepPlan, StepTokens

PARAMS = SamplingParams(
    temperature=0.5,
    seed=-(2**63),
    logit_bias={7: -1.5, 3: 2.0},
    stop=("a", "é"),
    stop_token_ids=(5,),
    grammar=GrammarSpec("regex", "[ab]+"),
    logprobs=2,
)
PLAN = StepPlan(
    step_id=9,
    rows=[4, 1],
    num_computed=[30, 0],
    num_scheduled=[1, 5],
    is_sampled=[True, False],
    num_decodes=1,
    row_starts=[RowStart(1, [5, 6, 7, 8, 9], 5, 2**64 - 1, PARAMS, "id")],
    page_updates=[(1, 0, 12), (1, 1, 2**31 - 1)],
)
TOKENS = StepTokens(9, [42], errors={}, ended=[])


@pytest.mark.parametrize(
    "order",
    [
        Setup(
            rank=3,
            size=4,
            store="/a/store",
            config=EngineConfig(model="m", dtype="bfloat16", kv_memory_gib=0.5),
            files=ModelFiles(Path("/a/b"), "random", "name", config={"vocab_size": 3, "list": [1.5, None]}),
            eos_token_ids=[2],
            has_grammars=True,
        ),
        Execute(PLAN),
        WarmUp(),
        PrepareGrammar(GrammarSpec("json_object")),
        Close(),
    ],
)
def test_orders_arrive_as_they_were_given(order: Order) -> None:
    assert decode_order(encode(order)) == order


@pytest.mark.parametrize(
    "report",
    [Started(), Prepared(), Ready(replace(LIMITS, context_cost=0.5)), Executed(b"\0\xff"), Failed("so it is")],
)
def test_reports_arrive_as_they_were_given(report: Report) -> None:
    assert decode_report(encode(report)) == report


def test_anything_else_is_refused() -> None:
    for data in (b"", b"\xc1", encode(Close()), encode({"type": "Started", "more": [1]})[:-1]):
        with pytest.raises(msgspec.DecodeError):
            decode_report(data)
    with pytest.raises(NotImplementedError, match="object is no part of a message"):
        encode(object())


def test_equal_steps_have_equal_hashes_on_both_sides_of_a_channel() -> None:
    """Whole numbers among sampling parameters arrive as floats, which must not matter."""
    start = replace(PLAN.row_starts[0], params=SamplingParams(temperature=0))
    plan = replace(PLAN, row_starts=[start])
    arrived = decode_order(encode(Execute(plan)))
    assert isinstance(arrived, Execute)
    ours, theirs = StepDigest(), StepDigest()
    for _ in range(3):
        assert ours.advance(plan, TOKENS) == theirs.advance(arrived.plan, replace(TOKENS, step_time_s=1.0))


@pytest.mark.parametrize(
    "change",
    [
        {"step_id": 8},
        {"rows": [4, 2]},
        {"num_computed": [31, 0]},
        {"num_scheduled": [1, 4]},
        {"is_sampled": [True, True]},
        {"num_decodes": 0},
        {"page_updates": [(1, 0, 12), (1, 1, 3)]},
        {"row_starts": [RowStart(1, [5, 6, 7, 8, 1], 5, 2**64 - 1, PARAMS)]},
        {"row_starts": [RowStart(1, [5, 6, 7, 8, 9], 5, 1, PARAMS)]},
        {"token_ids": [43]},
        {"errors": {0: "bad"}},
        {"ended": [0]},
    ],
    ids=str,
)
def test_whatever_differs_shows_in_this_hash_and_all_later_ones(change: dict[str, Any]) -> None:
    ours, theirs = StepDigest(), StepDigest()
    part = PLAN if set(change) & set(StepPlan.__slots__) - {"token_ids"} else TOKENS
    changed = replace(part, **change)
    plan, tokens = (changed, TOKENS) if isinstance(changed, StepPlan) else (PLAN, changed)
    assert ours.advance(PLAN, TOKENS) != theirs.advance(plan, tokens)
    assert ours.advance(PLAN, TOKENS) != theirs.advance(PLAN, TOKENS)

"""Results come back from the device in one piece; in between nothing waits."""

from collections.abc import Sequence

import pytest
import torch
from doubles_runner import TableModel, make_runner, single_plan
from torch import Tensor

from aserve.request import SamplingParams
from aserve.runner.transfer import Transfer, pack, unpack


def test_what_is_packed_comes_out_again() -> None:
    tensors = [
        torch.tensor([3, 2**40]),
        torch.tensor([True, False, True]),
        torch.randn(3, 4).t(),
        torch.tensor([[7]]),
        torch.zeros(0),
        torch.randn(5).bfloat16(),
    ]
    data = pack(tensors)
    assert data.dtype == torch.uint8
    for part, tensor in zip(unpack(data, tensors), tensors, strict=True):
        assert part.dtype == tensor.dtype
        assert torch.equal(part, tensor)


READS = ("tolist", "numpy", "item", "cpu", "nonzero", "__bool__", "__int__", "__float__")
PARAMS = SamplingParams(
    temperature=0.7, top_k=5, min_p=0.1, presence_penalty=1.0, min_tokens=3, logit_bias={7: 1.0}, logprobs=2,
    prompt_logprobs=1,
)  # fmt: skip


def test_a_step_reads_from_the_device_once_and_at_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every way of reading a tensor fails until the results are asked for; top_p alone may ask, and on a CPU only."""

    def refuse(tensor: Tensor, *arguments: object) -> object:
        raise AssertionError("the step waits for the device")

    read_back, num_waits = Transfer.read_back, 0
    ban = pytest.MonkeyPatch()

    def read_back_once(transfer: Transfer, groups: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
        nonlocal num_waits
        num_waits += 1
        ban.undo()
        return read_back(transfer, groups)

    monkeypatch.setattr(Transfer, "read_back", read_back_once)
    runner, _ = make_runner(TableModel())
    plan = single_plan([3, 4, 5, 6], PARAMS)
    try:
        for name in READS:
            ban.setattr(Tensor, name, refuse)
        tokens = runner.launch(plan).result(timeout=10)
    finally:
        ban.undo()
    runner.close()
    assert num_waits == 1
    assert tokens.logprobs is not None
    assert tokens.logprobs[0] is not None
    assert tokens.logprobs[0].token_id == tokens.token_ids[0]
    assert tokens.prompt_logprobs is not None
    assert [entry.token_id for entry in tokens.prompt_logprobs[0]] == [4, 5, 6]

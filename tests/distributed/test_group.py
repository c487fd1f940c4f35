"""The end of a group of ranks: left once, not waited for in vain; what NCCL would do is played."""

import logging
import threading
from pathlib import Path

import pytest
import torch

from aserve.distributed.context_shard import ContextShard
from aserve.distributed.group import RankGroup
from aserve.errors import ConfigError


def test_a_group_that_is_left_can_be_followed_by_another(tmp_path: Path) -> None:
    for number in range(2):
        group = RankGroup(ContextShard(0, 1), torch.device("cpu"))
        group.join(tmp_path / f"store-{number}")
        with pytest.raises(ConfigError, match="there can be only one"):
            RankGroup(ContextShard(0, 1), torch.device("cpu")).join(tmp_path / "other")
        assert group.all_gather(torch.tensor([3, 4])).tolist() == [[3, 4]]
        group.abort()
        group.close()
        group.close()
        assert not torch.distributed.is_initialized()


def test_a_group_whose_graphs_stay_is_not_waited_for_long(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As after a failure of the device, where nothing can be destroyed."""
    never = threading.Event()
    aborts: list[bool] = []

    def abort() -> None:
        aborts.append(True)
        never.wait(60)

    monkeypatch.setattr("torch.distributed.distributed_c10d._abort_process_group", abort)
    monkeypatch.setattr("aserve.distributed.group.LEAVE_TIMEOUT_S", 0.05)
    group = RankGroup(ContextShard(0, 2), torch.device("cuda"))
    group._is_joined = True
    group.abort()
    group.abort()
    with caplog.at_level(logging.WARNING):
        group.close()
    group.close()
    assert len(aborts) == 1
    assert caplog.messages == [
        "the group of ranks could not be left; this process can start no other engine with several"
    ]
    never.set()

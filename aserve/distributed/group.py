"""The ranks that compute together, each a process of its own with a device of its own."""

import os
import socket
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from aserve.distributed.context_shard import ContextShard
from aserve.errors import ConfigError

JOIN_TIMEOUT = timedelta(minutes=1)  # all are about to join when the first does; one that dies then is waited for
TIMEOUT = timedelta(minutes=30)  # of a collective: ranks load at different speeds; a rank that dies is noticed at once
_ALL_GATHER = getattr(
    dist, "all_gather_single", dist.all_gather_into_tensor
)  # the latter was its name before torch 2.13


class RankGroup:
    """Collectives of the process's only group; every rank calls the same ones in the same order.

    NCCL between GPUs, gloo over the loopback interface between processes on a CPU.
    """

    def __init__(self, shard: ContextShard, device: torch.device) -> None:
        self.shard = shard
        self._device = device
        self._is_joined = False

    def join(self, store: Path) -> None:
        """Meet the other ranks at the file ``store``; blocks until all are there.

        Raises ConfigError if this process is in a group already, RuntimeError if one is not there in JOIN_TIMEOUT.
        """
        if dist.is_initialized():
            raise ConfigError("an engine with several ranks runs in this process already, and there can be only one")
        _prepare_environment()
        try:
            dist.init_process_group(
                "nccl" if self._device.type == "cuda" else "gloo",
                init_method=store.absolute().as_uri(),
                rank=self.shard.rank,
                world_size=self.shard.size,
                timeout=JOIN_TIMEOUT,
                device_id=torch.device("cuda", torch.cuda.current_device()) if self._device.type == "cuda" else None,
            )
        except BaseException:
            dist.distributed_c10d._world.group_count = 0  # ranks that start afresh look for a group of this number
            raise
        dist.distributed_c10d._set_pg_timeout(TIMEOUT)
        self._is_joined = True

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Return the ``tensor`` [...] of every rank, of one shape and dtype, as [ranks, ...]. Can be captured."""
        gathered = tensor.new_empty((self.shard.size, *tensor.shape))
        _ALL_GATHER(gathered.view(-1), tensor.contiguous().view(-1))
        return gathered

    def min(self, value: int) -> int:
        """Return the smallest ``value`` of all ranks; waits for them."""
        return int(self.all_gather(torch.tensor(value, device=self._device)).min().item())

    def abort(self) -> None:
        """Let collectives that wait for a dead rank fail; those of gloo do so by themselves."""
        if self._is_joined and self._device.type == "cuda":
            dist.distributed_c10d._get_default_group().abort()

    def close(self) -> None:
        """Leave the group, if it was joined. Idempotent."""
        if self._is_joined:
            self._is_joined = False
            dist.destroy_process_group()


def _prepare_environment() -> None:
    """Set what the libraries read only there, unless it is set.

    NVLink's multicast needs rights that containers lack. torch would end the process when it finds a collective failed,
    before requests can be told. gloo would listen on an address that other hosts can reach.
    """
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)
    if loopback is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)

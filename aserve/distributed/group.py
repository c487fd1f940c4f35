"""The ranks that compute together, each a process of its own with a device of its own."""

import logging
import os
import socket
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from aserve.distributed.context_shard import ContextShard
from aserve.errors import ConfigError

logger = logging.getLogger(__name__)

JOIN_TIMEOUT = timedelta(minutes=1)  # all are about to join when the first does; one that dies then is waited for
TIMEOUT = timedelta(minutes=30)  # of a collective: ranks load at different speeds; a rank that dies is noticed at once
LEAVE_TIMEOUT_S = 10.0  # for NCCL to take back what it gave; it waits for the last graph that has collectives in it
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
        self._aborting: threading.Thread | None = None

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
        """Let collectives that wait for a dead rank end; those of gloo do so by themselves. Idempotent.

        Returns at once: NCCL's kernels end then, but NCCL waits for graphs that only the caller can destroy.
        """
        if self._is_joined and self._device.type == "cuda" and self._aborting is None:
            self._aborting = _start_thread(dist.distributed_c10d._abort_process_group)

    def close(self) -> None:
        """Leave the group, if it was joined, after all graphs with collectives of it are destroyed. Idempotent.

        Graphs that are not, as after a failure of the device, are not waited for long.
        """
        if not self._is_joined:
            return
        self._is_joined = False
        leaving = self._aborting or _start_thread(dist.destroy_process_group)
        leaving.join(LEAVE_TIMEOUT_S)
        if leaving.is_alive():
            logger.warning("the group of ranks could not be left; this process can start no other engine with several")


def _start_thread(target: Callable[[], None]) -> threading.Thread:
    """Run what may wait for ever, so that a process can end nevertheless."""
    thread = threading.Thread(target=target, name="aserve-leave-group", daemon=True)
    thread.start()
    return thread


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

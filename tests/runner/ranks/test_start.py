"""Starts that fail, and a rank 0 that is killed: no process and no file is left, and nobody waits long."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from doubles_models import make_oracle

from aserve.config import EngineConfig
from aserve.distributed.context_shard import ContextShard
from aserve.distributed.group import RankGroup
from aserve.distributed.rank_process import RankProcess
from aserve.errors import ConfigError
from aserve.model_files import ModelFiles
from aserve.runner.ranks.build import build_ranks

IDLE = "import time\ntime.sleep(600)\n"
DYING = """
import os, socket, sys
from aserve.distributed.channel import Channel
from aserve.distributed.messages import Started, encode
channel = Channel(socket.socket(fileno=int(sys.argv[1])))
channel.receive()
channel.send(encode(Started()))
os._exit(3)
"""
KILLED = """
import os, signal, sys
from pathlib import Path
from aserve.config import EngineConfig
from aserve.model_files import ModelFiles
from aserve.runner.ranks.build import build_ranks
settings = dict(device="cpu", dtype="float32", num_threads=1, num_pages=8, max_num_batched_tokens=16, max_model_len=32)
config = EngineConfig(model=sys.argv[1], decode_context_parallel_size=2, **settings)
runner = build_ranks(config, ModelFiles(Path(sys.argv[1]), "safetensors", "tiny"), {2})
(process,) = runner._others._processes
print(process._process.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def start(folder: Path, size: int) -> None:
    config = EngineConfig(
        model=str(folder), device="cpu", dtype="float32", num_threads=1, decode_context_parallel_size=size
    )
    build_ranks(config, ModelFiles(folder, "safetensors", "tiny"), {2})


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where ranks put what they share."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    monkeypatch.setenv("TMPDIR", str(folder))
    return folder


def work(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the other ranks run ``source``."""
    (tmp_path / "other_worker.py").write_text(source)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr("aserve.runner.ranks.build.WORKER", "other_worker")


def test_a_rank_that_dies_before_it_joins_is_not_waited_for_long(
    tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work(DYING, tmp_path, monkeypatch)
    monkeypatch.setattr("aserve.distributed.group.JOIN_TIMEOUT", timedelta(seconds=1))
    with pytest.raises(ConfigError, match="rank 1 has ended with status 3"):
        start(tmp_path, 2)
    assert not list(temporary.iterdir())
    alone = RankGroup(ContextShard(0, 1), torch.device("cpu"))
    alone.join(tmp_path / "store")
    assert torch.distributed.group.WORLD.group_name == "0", "ranks of another start would not find each other"
    alone.close()


def test_no_rank_is_left_when_another_cannot_be_started(
    tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work(IDLE, tmp_path, monkeypatch)
    started, original = list[RankProcess](), RankProcess.start

    def start_one(rank: int, module: str, environment: dict[str, str]) -> RankProcess:
        if rank == 2:
            raise OSError("no room for another process")
        started.append(original(rank, module, environment))
        return started[-1]

    monkeypatch.setattr(RankProcess, "start", start_one)
    with pytest.raises(OSError, match="no room"):
        start(tmp_path, 3)
    assert [process.exit_status(0.0) for process in started] == [-signal.SIGKILL]
    assert not list(temporary.iterdir())


@pytest.mark.full
def test_nothing_is_left_of_ranks_when_rank_0_is_killed(tmp_path: Path, temporary: Path) -> None:
    make_oracle("llama", {"num_hidden_layers": 1}, tmp_path)
    command: list[Any] = [sys.executable, "-c", KILLED, tmp_path]
    killed = subprocess.run(command, stdout=subprocess.PIPE, timeout=200, check=False)
    assert killed.returncode == -signal.SIGKILL
    worker = int(killed.stdout)
    wait_until(lambda: not is_alive(worker))
    assert not list(temporary.glob("aserve-*"))


def is_alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def wait_until(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.05)

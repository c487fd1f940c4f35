"""What rank 0 decides for all ranks before it starts them."""

from pathlib import Path

import pytest
import torch

from aserve.config import EngineConfig
from aserve.errors import ConfigError
from aserve.model_files import ModelFiles
from aserve.runner.ranks.build import build_ranks, settle

FILES = ModelFiles(Path("nowhere"), "safetensors", "tiny")


def test_what_would_be_measured_on_a_cpu_is_decided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aserve.runner.ranks.build.count_cores", lambda: (7, "cores"))
    monkeypatch.setattr("aserve.runner.choose_dtype.time_linears", lambda *_: [2.0, 1.0])
    settled = settle(EngineConfig(device="cpu", decode_context_parallel_size=2), FILES)
    assert (settled.dtype, settled.num_threads, settled.max_num_batched_tokens) == ("bfloat16", 3, 256)
    as_set = EngineConfig(
        device="cpu", decode_context_parallel_size=8, dtype="float32", num_threads=2, max_num_batched_tokens=40
    )
    assert settle(as_set, FILES) == as_set
    eight = settle(EngineConfig(device="cpu", dtype="float32", decode_context_parallel_size=8), FILES)
    assert eight.num_threads == 1


def test_as_many_gpus_as_ranks_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    with pytest.raises(ConfigError, match="decode_context_parallel_size 4 needs as many GPUs, and torch finds 3"):
        build_ranks(EngineConfig(decode_context_parallel_size=4), FILES, {2})
    assert settle(EngineConfig(decode_context_parallel_size=2), FILES).device == "cuda"


@pytest.mark.parametrize("size", [0, 9])
def test_a_number_of_ranks_out_of_range_is_refused(size: int) -> None:
    with pytest.raises(ConfigError, match=r"engine\.decode_context_parallel_size must be between 1 and 8"):
        EngineConfig(decode_context_parallel_size=size)

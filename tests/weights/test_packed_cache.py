"""Packed weights on disk: the second start reads nothing else, and no state of the cache keeps a model from loading."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from doubles_gguf import TinyFile
from doubles_models import PagedSequence, load_folder, make_oracle
from safetensors.torch import load_file, save_file
from torch import Tensor

import aserve.weights.load
from aserve.model_files import ModelFiles

TOKENS = [5, 17, 42, 98, 3]
METHODS = ("int8", "int8_torch")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ASERVE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "packed"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_oracle("qwen2", {}, tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Grows by one each time a checkpoint is read instead of the cache."""
    seen: list[str] = []
    fill = aserve.weights.load.fill

    def noted_fill(model: object, checkpoint: object) -> None:
        seen.append("read")
        fill(model, checkpoint)  # type: ignore[arg-type]

    monkeypatch.setattr(aserve.weights.load, "fill", noted_fill)
    return seen


def logits(folder: Path, method: str = "int8", dtype: torch.dtype = torch.float32) -> Tensor:
    return PagedSequence(load_folder(folder, method, dtype), len(TOKENS), dtype).step(TOKENS)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": True}], ids=["untied", "tied"])
def test_second_start_reads_the_cache(
    cache: Path, reads: list[str], method: str, changes: dict[str, bool], tmp_path: Path
) -> None:
    make_oracle("qwen2", changes, tmp_path / "model")
    first = logits(tmp_path / "model", method)
    assert len(list(cache.iterdir())) == 1
    assert torch.equal(logits(tmp_path / "model", method), first)
    assert len(reads) == 1


@pytest.mark.parametrize("has_divisors", [True, False])
def test_rope_divisors_of_a_gguf_are_kept(cache: Path, reads: list[str], has_divisors: bool, tmp_path: Path) -> None:
    tiny = TinyFile(make_oracle("llama", {}, tmp_path), "llama")
    if has_divisors:
        tiny.add("rope_freqs.weight", np.linspace(1, 8, 8, dtype=np.float32))
    path = tiny.write(tmp_path / "tiny.gguf")
    assert torch.equal(logits(path), logits(path))
    assert len(reads) == 1


def test_restored_weights_are_aligned(cache: Path, folder: Path, reads: list[str]) -> None:
    load_folder(folder, "int8")
    restored = load_folder(folder, "int8")
    assert len(reads) == 1
    tensors = [tensor for layer in restored.weighted_layers() for tensor in layer.tensors.values()]
    assert len(tensors) > 20
    assert all(tensor.data_ptr() % 64 == 0 for tensor in tensors)


def test_unquantized_weights_are_not_kept(cache: Path, folder: Path) -> None:
    load_folder(folder)
    assert not cache.exists()


def test_methods_and_dtypes_do_not_share(cache: Path, folder: Path, reads: list[str]) -> None:
    for method in METHODS:
        for dtype in (torch.float32, torch.bfloat16):
            logits(folder, method, dtype)
    assert len(reads) == len(list(cache.iterdir()))
    assert len(reads) >= 2


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_changed_checkpoint_is_read_again(cache: Path, folder: Path, reads: list[str], name: str) -> None:
    first = logits(folder)
    tensors = load_file(folder / "model.safetensors")
    save_file({key: -tensor for key, tensor in tensors.items()}, folder / "model.safetensors")
    os.utime(folder / name, ns=(1, 1))
    second = logits(folder)
    assert not torch.equal(first, second)
    assert len(reads) == 2
    assert len(list(cache.iterdir())) == 1, "the state before is replaced"


def _truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def _empty(file: Path) -> None:
    file.write_bytes(b"")


def _scramble(file: Path) -> None:
    file.write_bytes(os.urandom(1000))


def _drop_a_tensor(file: Path) -> None:
    from safetensors import safe_open

    tensors = load_file(file)
    with safe_open(file, "pt") as opened:
        metadata = opened.metadata()
    del tensors["model.norm/weight"]
    save_file(tensors, file, metadata)


def _forget_the_source(file: Path) -> None:
    save_file(load_file(file), file)


@pytest.mark.parametrize("damage", [_truncate, _empty, _scramble, _drop_a_tensor, _forget_the_source])
def test_damaged_cache_is_replaced(cache: Path, folder: Path, reads: list[str], damage: Callable[[Path], None]) -> None:
    first = logits(folder)
    damage(next(cache.iterdir()))
    assert torch.equal(logits(folder), first)
    assert torch.equal(logits(folder), first)
    assert len(reads) == 2


def test_unusable_cache_folder_is_no_obstacle(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file stands where the folder should be, which stops the superuser as well."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ASERVE_CACHE", str(tmp_path / "file"))
    assert logits(folder).isfinite().all()


def test_failed_write_leaves_nothing(cache: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(file: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    assert logits(folder).isfinite().all()
    assert not list(cache.iterdir())


DEMO_START = """
import re, resource, sys, time, torch
from pathlib import Path
from aserve.demo_model import find_demo_model
from aserve.kernels.operators import Operators
from aserve.weights.load import load_model
start = time.process_time()
load_model(find_demo_model(), device=torch.device("cpu"), dtype=torch.float32, quantization="int8_torch",
           operators=Operators())
seconds = time.process_time() - start
assert "transformers" not in sys.modules
status = Path("/proc/self/status")  # getrusage counts what the parent had before this process became its own
if status.exists():
    peak_kib = int(re.search(r"VmHWM:\\s+(\\d+) kB", status.read_text())[1])
else:
    peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1024 if sys.platform == "darwin" else 1)
print(seconds, peak_kib / 1024)
"""


def test_demo_starts_small_and_then_fast(cache: Path, demo_files: ModelFiles) -> None:
    """In processes of their own, because the peak of memory is counted per process."""
    cache.parent.mkdir()
    (cache.parent / demo_files.path.name).symlink_to(demo_files.path)
    first_s, first_mib = _start_demo()
    later_s, later_mib = _start_demo()
    assert later_s < first_s / 4
    assert max(first_mib, later_mib) < 1000  # of the 1.2 GB that a server may take without its KV pool


def _start_demo() -> tuple[float, float]:
    finished = subprocess.run([sys.executable, "-c", DEMO_START], capture_output=True, text=True, check=True)
    seconds, mebibytes = map(float, finished.stdout.split())
    return seconds, mebibytes

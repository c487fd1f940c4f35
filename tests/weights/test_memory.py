"""A model too large for the GPU is refused before its weights are read, and running out on the way is explained."""

import gc
import json
import re
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from doubles_models import make_oracle

from aserve.builtin_models import BUILTIN_MODELS
from aserve.config import EngineConfig
from aserve.errors import ConfigError, WeightsError
from aserve.kernels.operators import Operators
from aserve.layers.weighted import WeightFormat
from aserve.model_files import ModelFiles
from aserve.models.config import DecoderConfig
from aserve.models.decoder import Decoder
from aserve.quantization.unquantized import Unquantized
from aserve.runner.build import build_runner
from aserve.weights.load import load_model
from aserve.weights.memory import check_memory, explain_exhaustion

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
GIB = 1 << 30


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[ModelFiles, int]:
    """A checkpoint, and how many parameters transformers counts in it."""
    folder: Path = tmp_path_factory.mktemp("tiny")
    oracle = make_oracle("llama", {"num_hidden_layers": 2}, folder)
    return ModelFiles(folder, "safetensors", "tiny"), oracle.num_parameters()


def leave_free(monkeypatch: pytest.MonkeyPatch, free_bytes: int) -> None:
    """Let torch report a GPU of 80 GiB, of which ``free_bytes`` are free."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free_bytes, 80 * GIB))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_may_fill_what_is_free_and_no_byte_more(
    tiny: tuple[ModelFiles, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The count is that of transformers, whatever the layers merge."""
    files, num_parameters = tiny
    on_cpu = WeightFormat(Unquantized(), dtype, CPU)
    model = load_model(files, device=CPU, dtype=dtype, quantization="none", operators=Operators()).model
    needed = num_parameters * dtype.itemsize
    leave_free(monkeypatch, needed)
    check_memory(model, replace(on_cpu, device=CUDA))
    leave_free(monkeypatch, needed - 1)
    with pytest.raises(ConfigError, match="do not fit on the GPU"):
        check_memory(model, replace(on_cpu, device=CUDA))
    check_memory(model, on_cpu)  # a CPU's memory is not asked for


@pytest.mark.parametrize(("name", "needed"), [("Llama-3.1-8B", "14.96"), ("gpt-oss-120b", "217.61")])
def test_needed_and_free_are_named_in_gib(name: str, needed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16, of 8,030,261,248 and 116,829,156,672 parameters. The weights are never made."""
    weights = WeightFormat(Unquantized(), torch.bfloat16, CPU)
    model = Decoder(DecoderConfig.from_hf(BUILTIN_MODELS[name]), weights, Operators())
    leave_free(monkeypatch, 9 * GIB + GIB // 4)
    words = rf"need {re.escape(needed)} GiB, 9\.25 of 80\.00 GiB are free; stop what else uses"
    with pytest.raises(ConfigError, match=words):
        check_memory(model, replace(weights, device=CUDA))


def test_what_a_failed_start_left_in_a_cycle_is_given_back_first(
    tiny: tuple[ModelFiles, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Frame:
        """Knows itself, as the frames of a start and their error do."""

        def __init__(self) -> None:
            self.weights, self.error = torch.empty(8), self

    files, _ = tiny
    model = load_model(files, device=CPU, dtype=torch.float32, quantization="none", operators=Operators()).model
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (GIB if left() is None else 0, 80 * GIB))
    gc.disable()
    try:
        left = weakref.ref(Frame().weights)
        assert left() is not None
        check_memory(model, WeightFormat(Unquantized(), torch.float32, CUDA))
    finally:
        gc.enable()


@pytest.mark.parametrize("is_random", [False, True])
def test_nothing_is_read_or_drawn_if_it_will_not_fit(
    tiny: tuple[ModelFiles, int], is_random: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, _ = tiny
    if is_random:
        files = replace(files, format="random", config=json.loads((files.path / "config.json").read_text()))
    monkeypatch.setattr("aserve.layers.rotary.RotaryTable._build", lambda self, divisors: torch.empty(0))
    for name in ("fill", "fill_with_random"):
        monkeypatch.setattr(f"aserve.weights.load.{name}", lambda *_: pytest.fail("weights were touched"))
    leave_free(monkeypatch, 1)
    with pytest.raises(ConfigError, match="do not fit on the GPU"):
        load_model(files, device=CUDA, dtype=torch.bfloat16, quantization="none", operators=Operators())


def test_running_out_while_loading_is_explained(tiny: tuple[ModelFiles, int], monkeypatch: pytest.MonkeyPatch) -> None:
    def run_out(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr("aserve.weights.load.fill", run_out)
    leave_free(monkeypatch, GIB // 2)
    files, _ = tiny
    message = r"while loading weights: 0\.50 of 80\.00 GiB are free; stop .*Tried to allocate 2\.00 GiB"
    with pytest.raises(ConfigError, match=message) as caught:
        build_runner(EngineConfig(device="cpu", dtype="float32", num_threads=1), files, frozenset())
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)


def test_other_errors_pass_as_they_are() -> None:
    with pytest.raises(WeightsError, match=re.escape("cut short")), explain_exhaustion(CPU, "loading weights"):
        raise WeightsError("cut short")

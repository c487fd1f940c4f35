"""Scales of keys and values as a start resolves them: the checkpoint's, or measured as transformers' cache has them."""

import logging
from pathlib import Path

import pytest
import torch
from doubles_models import load_folder, make_oracle
from safetensors.torch import load_file, save_file

from aserve.attention.base import KVScales
from aserve.errors import ConfigError, WeightsError
from aserve.kernels.operators import Operators
from aserve.runner.kv_scales import measure_extremes, resolve_kv_scales

CPU = torch.device("cpu")
FP8 = torch.float8_e4m3fn


def resolve(folder: Path, kv_dtype: torch.dtype) -> tuple[KVScales, ...]:
    return resolve_kv_scales(load_folder(folder), kv_dtype, torch.float32, CPU, Operators())


def test_twice_the_largest_seen_just_fits(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What transformers caches while the same tokens run, 64 being the context of the tiny model."""
    oracle = make_oracle("qwen3", {"head_dim": 16}, tmp_path)
    caplog.set_level(logging.INFO)
    scales = resolve(tmp_path, FP8)
    token_ids = torch.randint(99, (64,), generator=torch.Generator().manual_seed(20))
    with torch.no_grad():
        cached = oracle(token_ids.unsqueeze(0), use_cache=True).past_key_values
    assert len(scales) == len(cached.layers) == 3
    for layer, found in zip(cached.layers, scales, strict=True):
        assert found.key == pytest.approx(2 * layer.keys.abs().max().item() / 448, rel=1e-4)
        assert found.value == pytest.approx(2 * layer.values.abs().max().item() / 448, rel=1e-4)
    (line,) = [message for message in caplog.messages if message.startswith("kv_scales=")]
    assert line.startswith("kv_scales=per layer (measured on 64 random tokens: ")


def test_unquantised_pages_have_none_and_nothing_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_oracle("llama", {}, tmp_path)
    monkeypatch.setattr("aserve.runner.kv_scales.measure_extremes", lambda *_: pytest.fail("the model was run"))
    assert resolve(tmp_path, torch.float32) == (KVScales(),) * 3


def test_those_of_the_checkpoint_come_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    make_oracle("llama", {"num_hidden_layers": 2}, tmp_path)
    monkeypatch.setattr("aserve.runner.kv_scales.measure_extremes", lambda *_: pytest.fail("the model was run"))
    caplog.set_level(logging.INFO)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors |= {f"model.layers.0.self_attn.{letter}_scale": torch.tensor(0.25) for letter in "kv"}
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(WeightsError, match="no scales for keys and values of layer 1"):
        resolve(tmp_path, FP8)
    tensors |= {f"model.layers.1.self_attn.{letter}_scale": torch.tensor(0.5) for letter in "kv"}
    save_file(tensors, file, {"format": "pt"})
    assert resolve(tmp_path, FP8) == (KVScales(0.25, 0.25), KVScales(0.5, 0.5))
    assert caplog.messages == ["kv_scales=per layer (from the checkpoint)"]


def test_layers_that_say_nothing_get_one(tmp_path: Path) -> None:
    make_oracle("llama", {"num_hidden_layers": 1}, tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.0.self_attn.v_proj.weight"].zero_()
    save_file(tensors, file, {"format": "pt"})
    (scales,) = resolve(tmp_path, FP8)
    assert scales.value == 1.0
    assert scales.key != 1.0


def test_a_model_without_numbers_is_refused(tmp_path: Path) -> None:
    make_oracle("llama", {"num_hidden_layers": 1}, tmp_path)
    model = load_folder(tmp_path)
    model.slots()["model.layers.0.input_layernorm.weight"].write(torch.full((64,), torch.nan))
    with pytest.raises(ConfigError, match="no scales can be measured"):
        measure_extremes(model, 8, torch.float32, CPU, Operators())

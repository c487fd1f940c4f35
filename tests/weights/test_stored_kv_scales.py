"""Scales of keys and values in checkpoints, under the names and in the shapes that quantisers write."""

from pathlib import Path

import pytest
import torch
from doubles_models import edit_config, load_folder, make_oracle
from safetensors.torch import load_file, save_file
from torch import Tensor

from aserve.attention.base import KVScales
from aserve.errors import ConfigError, WeightsError
from aserve.models.decoder import Decoder

LAYERS = [f"model.layers.{layer_idx}.self_attn" for layer_idx in range(2)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two layers with two KV heads each."""
    make_oracle("llama", {"num_hidden_layers": 2}, tmp_path)
    return tmp_path


def add(folder: Path, tensors: dict[str, Tensor]) -> Decoder:
    file = folder / "model.safetensors"
    save_file(load_file(file) | tensors, file, {"format": "pt"})
    return load_folder(folder)


def test_most_checkpoints_have_none(folder: Path) -> None:
    assert load_folder(folder).stored_kv_scales() == [None, None]


@pytest.mark.parametrize("names", ["k_scale v_scale", "attn.k_scale attn.v_scale", "k_proj.k_scale v_proj.v_scale"])
@pytest.mark.parametrize("shape", [(), (1,)])
def test_one_for_all_heads_of_a_layer(folder: Path, names: str, shape: tuple[int, ...]) -> None:
    key, value = names.split()
    tensors = {f"{layer}.{key}": torch.full(shape, 0.25 * (i + 1)) for i, layer in enumerate(LAYERS)}
    tensors |= {f"{layer}.{value}": torch.full(shape, 0.5).bfloat16() for layer in LAYERS}
    assert add(folder, tensors).stored_kv_scales() == [KVScales(0.25, 0.5), KVScales(0.5, 0.5)]


@pytest.mark.parametrize("shape", [(2,), (2, 1, 1)])
def test_one_for_each_head(folder: Path, shape: tuple[int, ...]) -> None:
    tensors = {f"{layer}.k_scale": torch.tensor([0.25, 2.0]).view(shape) for layer in LAYERS}
    tensors |= {f"{layer}.v_scale": torch.tensor(0.5) for layer in LAYERS}
    for scales in add(folder, tensors).stored_kv_scales():
        assert scales is not None
        assert scales.are_per_head
        assert torch.equal(torch.as_tensor(scales.key), torch.tensor([0.25, 2.0]))
        assert torch.equal(torch.as_tensor(scales.value), torch.tensor([0.5, 0.5]))


@pytest.mark.parametrize("bad", [0.0, -1.0, torch.nan, torch.inf])
def test_a_scale_that_cannot_be_is_named(folder: Path, bad: float) -> None:
    with pytest.raises(WeightsError, match=r"layers.0.self_attn.k_scale: scales must be positive and finite"):
        add(folder, {f"{LAYERS[0]}.k_scale": torch.tensor(bad)})


def test_a_scale_of_another_shape_is_named(folder: Path) -> None:
    with pytest.raises(WeightsError, match=r"layers.0.self_attn.k_scale .* has the shape \[3\]"):
        add(folder, {f"{LAYERS[0]}.k_scale": torch.ones(3)})


def test_two_names_for_one_scale_are_refused(folder: Path) -> None:
    with pytest.raises(WeightsError, match="has this scale under another name, too"):
        add(folder, {f"{LAYERS[0]}.{name}": torch.tensor(1.0) for name in ("k_scale", "attn.k_scale")})


def test_keys_without_values_are_refused(folder: Path) -> None:
    model = add(folder, {f"{LAYERS[0]}.k_scale": torch.tensor(1.0)})
    with pytest.raises(WeightsError, match=r"layers.0.self_attn.v_scale is missing"):
        model.stored_kv_scales()


def test_a_config_that_speaks_of_the_kv_cache_only_is_no_quantised_checkpoint(folder: Path) -> None:
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
    quantization = {"quant_method": "compressed-tensors", "kv_cache_scheme": scheme, "config_groups": {}}
    edit_config(folder, {"quantization_config": quantization})
    load_folder(folder)
    edit_config(folder, {"quantization_config": quantization | {"config_groups": {"group_0": {"targets": ["Linear"]}}}})
    with pytest.raises(ConfigError, match="unsupported quantised checkpoint"):
        load_folder(folder)

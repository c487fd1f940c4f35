"""Experts of a checkpoint: what is missing or there twice, and int8 weights of each, packed once."""

import logging
from pathlib import Path

import pytest
import torch
from doubles_models import PagedSequence, load_folder, make_oracle
from safetensors.torch import load_file, save_file
from torch import Tensor

from aserve.errors import WeightsError
from aserve.layers.experts import Experts
from aserve.models.decoder import Decoder
from aserve.quantization.registry import QUANT_METHODS

EXPERTS = "model.layers.1.mlp.experts"
INT8_NAMES = [n for n, refusal in QUANT_METHODS.refusals().items() if refusal is None and n.startswith("int8")]


@pytest.fixture
def tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Tensor]:
    """What a checkpoint of transformers holds, with a tensor an expert and projection."""
    monkeypatch.setenv("ASERVE_CACHE", str(tmp_path / "cache"))
    changes = {"num_experts": 4, "num_experts_per_tok": 4, "moe_intermediate_size": 48, "norm_topk_prob": True}
    make_oracle("qwen3_moe", changes, tmp_path)
    return {name: tensor.clone() for name, tensor in load_file(tmp_path / "model.safetensors").items()}


def merged(tensors: dict[str, Tensor], *parts: str) -> Tensor:
    """Return the projections ``parts`` of all experts of a layer as one tensor."""
    return torch.stack([torch.cat([tensors[f"{EXPERTS}.{i}.{part}.weight"] for part in parts]) for i in range(4)])


def test_an_expert_that_is_missing_is_named(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    del tensors[f"{EXPERTS}.2.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match=f"tensor {EXPERTS}.2.up_proj.weight missing"):
        load_folder(tmp_path)


@pytest.mark.parametrize(("name", "parts"), [("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",))])
def test_experts_that_are_there_alone_and_together_are_refused(
    name: str, parts: tuple[str, ...], tmp_path: Path, tensors: dict[str, Tensor]
) -> None:
    save_file(tensors | {f"{EXPERTS}.{name}": merged(tensors, *parts)}, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match="occurs twice"):
        load_folder(tmp_path)


def test_a_layer_may_have_some_alone_and_some_together(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    expected = experts_of(load_folder(tmp_path)).tensors
    down = merged(tensors, "down_proj")
    rest = {name: tensor for name, tensor in tensors.items() if not (EXPERTS in name and "down_proj" in name)}
    save_file(rest | {f"{EXPERTS}.down_proj": down}, tmp_path / "model.safetensors")
    actual = experts_of(load_folder(tmp_path)).tensors
    assert torch.equal(actual["gate_up.weight"], expected["gate_up.weight"])
    assert torch.equal(actual["down.weight"], down)


def experts_of(model: Decoder) -> Experts:
    (layer,) = (layer for layer in model.weighted_layers() if layer.name == EXPERTS)
    assert isinstance(layer, Experts)
    return layer


@pytest.mark.parametrize("quantization", INT8_NAMES)
def test_int8_experts_stay_close_and_come_back_from_the_cache(
    quantization: str, tmp_path: Path, tensors: dict[str, Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    packed, again = load_folder(tmp_path, quantization), load_folder(tmp_path, quantization)
    assert "took packed weights" in caplog.text
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(1))
    for expert in range(4):
        exact = x @ torch.cat([tensors[f"{EXPERTS}.{expert}.{part}.weight"] for part in ("gate_proj", "up_proj")]).T
        result = experts_of(packed).gate_up(x, expert)
        assert (result - exact).norm() / exact.norm() < 0.02
    step = PagedSequence(packed, 8).step([5, 17, 42])
    assert torch.equal(step, PagedSequence(again, 8).step([5, 17, 42]))
    # All experts are taken, so that rounding cannot change which.
    exact_step = PagedSequence(load_folder(tmp_path), 8).step([5, 17, 42])
    assert (step - exact_step).norm() / exact_step.norm() < 0.1

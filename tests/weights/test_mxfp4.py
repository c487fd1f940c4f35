"""Checkpoints in MXFP4: each number and scale by the specification's tables, tensors and logits as transformers'."""

import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from doubles_gpt_oss import MXFP4, draw_packed, make_mxfp4_checkpoint
from doubles_models import PagedSequence, edit_config, load_folder, make_oracle
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from aserve.errors import ConfigError, WeightsError
from aserve.models.config import DecoderConfig
from aserve.weights.mxfp4 import expand_mxfp4

CPU = torch.device("cpu")
BLOCKS = "model.layers.1.mlp.experts.down_proj_blocks"
SCALES = "model.layers.1.mlp.experts.down_proj_scales"
# Table of E2M1 in the Microscaling specification, by the bits sign, exponent, exponent, mantissa.
E2M1 = {
    "0000": 0.0, "0001": 0.5, "0010": 1.0, "0011": 1.5, "0100": 2.0, "0101": 3.0, "0110": 4.0, "0111": 6.0,
    "1000": -0.0, "1001": -0.5, "1010": -1.0, "1011": -1.5, "1100": -2.0, "1101": -3.0, "1110": -4.0, "1111": -6.0,
}  # fmt: skip
TOKENS = [5, 17, 42, 98, 3, 61, 7, 24, 80, 11, 36, 2]


def test_numbers_are_those_of_the_specification() -> None:
    codes = [(2 * place) % 16 for place in range(16)], [(2 * place + 1) % 16 for place in range(16)]
    blocks = torch.tensor([low | high << 4 for low, high in zip(*codes, strict=True)], dtype=torch.uint8)
    for scale in (0, 1, 100, 127, 128, 200, 250):
        expanded = expand_mxfp4(blocks.view(1, 1, 1, 16), torch.tensor([[[scale]]], dtype=torch.uint8), CPU)
        expected = [E2M1[f"{number % 16:04b}"] * 2.0 ** (scale - 127) for number in range(32)]
        assert expanded.shape == (1, 32, 1)
        assert expanded.flatten().double().tolist() == expected
    unknown = expand_mxfp4(blocks.view(1, 1, 1, 16), torch.tensor([[[255]]], dtype=torch.uint8), CPU)
    assert bool(unknown.isnan().all())


def test_tensors_equal_transformers() -> None:
    blocks, scales = draw_packed(torch.empty(3, 96, 40), torch.Generator().manual_seed(2))
    expected = convert_moe_packed_tensors(blocks, scales)
    assert expected.shape == (3, 96, 40)
    assert torch.equal(expand_mxfp4(blocks, scales, CPU), expected)


@torch.inference_mode()
@pytest.mark.parametrize("in_two_files", [False, True])
def test_logits_equal_transformers(in_two_files: bool, tmp_path: Path) -> None:
    oracle = make_mxfp4_checkpoint(tmp_path)
    if in_two_files:
        _split(tmp_path)
    expected = oracle(torch.tensor([TOKENS])).logits[0]
    assert expected.std() > 0.5
    sequence = PagedSequence(load_folder(tmp_path), len(TOKENS))
    logits = torch.cat([sequence.step(TOKENS[:9]), sequence.step(TOKENS[9:])])
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)


def _split(folder: Path) -> None:
    """Put the scales of a layer into another file than its blocks."""
    tensors = load_file(folder / "model.safetensors")
    owners = {name: f"model-{1 + ('scales' in name)}.safetensors" for name in tensors}
    for file in set(owners.values()):
        save_file({name: tensor for name, tensor in tensors.items() if owners[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": owners}))
    (folder / "model.safetensors").unlink()


def test_int8_experts_with_biases_and_sinks_come_back_from_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setenv("ASERVE_CACHE", str(tmp_path / "cache"))
    make_mxfp4_checkpoint(tmp_path, {"num_experts_per_tok": 6})  # all, so that rounding cannot change which
    exact, packed, again = (
        PagedSequence(load_folder(tmp_path, method), len(TOKENS)).step(TOKENS)
        for method in ("none", "int8_torch", "int8_torch")
    )
    assert "took packed weights" in caplog.text
    assert torch.equal(again, packed)
    assert (packed - exact).norm() / exact.norm() < 0.1


def _without_scales(tensors: dict[str, Tensor]) -> None:
    del tensors[SCALES]


def _without_blocks(tensors: dict[str, Tensor]) -> None:
    del tensors[BLOCKS]


def _short_scales(tensors: dict[str, Tensor]) -> None:
    tensors[SCALES] = tensors[SCALES][..., :2].contiguous()


def _float_scales(tensors: dict[str, Tensor]) -> None:
    tensors[SCALES] = tensors[SCALES].float()


def _short_blocks(tensors: dict[str, Tensor]) -> None:
    tensors[BLOCKS] = tensors[BLOCKS][..., :8].contiguous()


def _beside_plain(tensors: dict[str, Tensor]) -> None:
    tensors[BLOCKS.removesuffix("_blocks")] = torch.zeros(6, 96, 64)


DAMAGES = [
    (_without_scales, f"tensor {SCALES} is missing from .*, but .* has {BLOCKS}"),
    (_without_blocks, "tensor model.layers.1.mlp.experts.down_proj missing"),
    (_short_scales, rf"{BLOCKS} in .* cannot be expanded: the scales have the shape \[6, 64, 2\]"),
    (_float_scales, f"{SCALES} in .* is of the type F32, but MXFP4 is kept in U8"),
    (_short_blocks, r"has the shape \[6, 48, 64\], but the config asks for \[6, 96, 64\]"),
    (_beside_plain, "occurs twice"),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGES)
def test_damage_is_named(damage: Callable[[dict[str, Tensor]], None], message: str, tmp_path: Path) -> None:
    make_mxfp4_checkpoint(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    damage(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match=message):
        load_folder(tmp_path)


def test_other_models_are_not_read_in_mxfp4(tmp_path: Path) -> None:
    make_oracle("llama", {"num_hidden_layers": 1}, tmp_path)
    with pytest.raises(ConfigError, match=r"quantised checkpoint: quantization_config is .*mxfp4"):
        DecoderConfig.from_hf(edit_config(tmp_path, MXFP4))

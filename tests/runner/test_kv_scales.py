"""Scales of keys and values as a start resolves them: the checkpoint's, or measured as transformers' cache has them.

Keys that are transformed, too, leave a model what it is.
"""

import logging
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from doubles_gpt_oss import GPT_OSS
from doubles_models import PagedSequence, load_folder, make_oracle
from safetensors.torch import load_file, save_file
from torch import Tensor

from aserve.attention.base import KVScales
from aserve.distributed.context_shard import ContextShard
from aserve.distributed.group import RankGroup
from aserve.errors import ConfigError, WeightsError
from aserve.kernels.nvfp4 import NVFP4, dequantise, quantise
from aserve.kernels.operators import Operators
from aserve.model_files import ModelFiles
from aserve.runner.kv_scales import measure_kv_scales, resolve_kv_scales, take_from_first_rank

CPU = torch.device("cpu")
FP8 = torch.float8_e4m3fn


def resolve(folder: Path, kv_dtype: torch.dtype) -> tuple[KVScales, ...]:
    files = ModelFiles(folder, "safetensors", folder.name)
    return resolve_kv_scales(load_folder(folder), files, kv_dtype, torch.float32, CPU, Operators())


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
        transform = found.key_transform
        assert transform is not None
        stored = layer.keys[0] @ transform.key - transform.offset.unsqueeze(1)
        assert found.key == pytest.approx(2 * stored.abs().max().item() / 448, rel=1e-3)
        assert found.value == pytest.approx(2 * layer.values.abs().max().item() / 448, rel=1e-4)
    (line,) = [message for message in caplog.messages if message.startswith("kv_scales=")]
    assert line.startswith("kv_scales=per layer (measured on 64 random tokens, ")


def test_what_is_fed_back_to_second_halves_fits_too(tmp_path: Path) -> None:
    """Of keys as transformers caches them; first halves are rounded as if twice their largest number just fitted."""
    oracle = make_oracle("qwen3", {"head_dim": 32}, tmp_path)
    scales = resolve(tmp_path, NVFP4)
    token_ids = torch.randint(99, (64,), generator=torch.Generator().manual_seed(20))
    with torch.no_grad():
        cached = oracle(token_ids.unsqueeze(0), use_cache=True).past_key_values
    were_fed = []
    for layer, found in zip(cached.layers, scales, strict=True):
        transform = found.key_transform
        assert transform is not None
        assert transform.feedback is not None
        first, second = (layer.keys[0] @ transform.key - transform.offset.unsqueeze(1)).chunk(2, dim=-1)
        scale = 2 * first.abs().max().item() / (6 * 448)
        fed = second + (dequantise(*quantise(first, scale)) * scale - first) @ transform.feedback
        assert found.key == pytest.approx(max(scale, 2 * fed.abs().max().item() / (6 * 448)), rel=1e-3)
        were_fed.append(fed.abs().max() > max(first.abs().max(), 1.01 * second.abs().max()))
    assert any(were_fed), "the feedback is what counts in some layer"


def test_ids_that_the_model_does_not_know_are_not_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The tokenizer's bytes have ids up to 255, the tiny model those below 99."""
    make_oracle("llama", {"num_hidden_layers": 1}, tmp_path)
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    bytewise = tokenizers.Tokenizer(tokenizers.models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    bytewise.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytewise.decoder = tokenizers.decoders.ByteLevel()
    bytewise.save(str(tmp_path / "tokenizer.json"))
    caplog.set_level(logging.INFO)
    resolve(tmp_path, FP8)
    assert any("measured on 64 random tokens" in message for message in caplog.messages)


def test_unquantised_pages_have_none_and_nothing_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_oracle("llama", {}, tmp_path)
    monkeypatch.setattr("aserve.runner.kv_scales.measure_kv_scales", lambda *_: pytest.fail("the model was run"))
    assert resolve(tmp_path, torch.float32) == (KVScales(),) * 3


def test_those_of_the_checkpoint_come_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    make_oracle("llama", {"num_hidden_layers": 2}, tmp_path)
    monkeypatch.setattr("aserve.runner.kv_scales.measure_kv_scales", lambda *_: pytest.fail("the model was run"))
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
    assert caplog.messages == ["kv_scales=per layer (from the checkpoint; keys are stored as they are)"]


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
        measure_kv_scales(model, FP8, torch.arange(8), torch.float32, Operators())


def test_ranks_take_what_the_first_measured(tmp_path: Path) -> None:
    class Group(RankGroup):
        """A second rank, whose first one has twice as much of everything."""

        def all_gather(self, tensor: Tensor) -> Tensor:
            return torch.stack((2 * tensor, tensor))

    make_oracle("llama", {"num_hidden_layers": 1, "head_dim": 32}, tmp_path)
    (own,) = measure_kv_scales(load_folder(tmp_path), NVFP4, torch.arange(8), torch.float32, Operators())
    given = KVScales(0.25, torch.ones(2))
    (taken, kept) = take_from_first_rank((own, given), Group(ContextShard(1, 2), CPU))
    assert kept is given
    assert (taken.key, taken.value) == (2 * own.key, 2 * own.value)
    assert taken.key_transform is not None
    assert own.key_transform is not None
    assert torch.equal(taken.key_transform.key, 2 * own.key_transform.key)
    assert torch.equal(taken.key_transform.query, 2 * own.key_transform.query)
    assert torch.equal(taken.key_transform.offset, 2 * own.key_transform.offset)
    assert taken.key_transform.feedback is not None
    assert own.key_transform.feedback is not None
    assert torch.equal(taken.key_transform.feedback, 2 * own.key_transform.feedback)


CAPS = {"attn_logit_softcapping": 1.5, "sliding_window": 6, "head_dim": 24, "query_pre_attn_scalar": 12}
IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


@pytest.mark.parametrize(
    ("model_type", "changes", "kv_dtype", "has_offset"),
    [
        ("llama", {}, FP8, True),
        ("qwen3", {"head_dim": 16}, FP8, True),
        ("mistral", {"sliding_window": 6}, FP8, True),
        ("phi3", IDS | {"rope_parameters": {"partial_rotary_factor": 0.75}}, FP8, True),
        ("gemma2", IDS | CAPS, FP8, False),
        ("gpt_oss", GPT_OSS, FP8, False),
        ("qwen3", {"head_dim": 32}, NVFP4, True),
        ("gemma2", IDS | CAPS | {"head_dim": 96}, NVFP4, False),
    ],
)
def test_transformed_keys_give_the_logits_of_transformers(
    model_type: str, changes: dict[str, Any], kv_dtype: torch.dtype, has_offset: bool, tmp_path: Path
) -> None:
    """In float32 pages, computed in chunks and token by token; with sinks and soft-caps keys keep their place."""
    oracle = make_oracle(model_type, changes, tmp_path)
    model = load_folder(tmp_path)
    token_ids = torch.randint(99, (24,), generator=torch.Generator().manual_seed(3))
    scales = measure_kv_scales(model, kv_dtype, torch.arange(64), torch.float32, Operators())
    transforms = [layer.key_transform for layer in scales if layer.key_transform is not None]
    assert len(transforms) == model.config.num_layers
    assert all(bool(transform.offset.any()) == has_offset for transform in transforms)
    sequence = PagedSequence(model, len(token_ids), scales=scales)
    logits = torch.cat([sequence.step(part.tolist()) for part in torch.split(token_ids, [15, 6, 1, 1, 1])])
    with torch.no_grad():
        expected = oracle(token_ids.unsqueeze(0)).logits[0]
    torch.testing.assert_close(logits, expected, rtol=0, atol=2e-4)

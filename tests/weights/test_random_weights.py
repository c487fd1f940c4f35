"""Models without a checkpoint: what is drawn, that it is drawn alike each time, and that it serves."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from doubles_gpt_oss import MXFP4
from doubles_models import TINY, PagedSequence

from aserve.cli import main
from aserve.config import EngineConfig
from aserve.engine.async_engine import AsyncEngine
from aserve.errors import ConfigError
from aserve.kernels.operators import Operators
from aserve.model_files import ModelFiles, locate_model
from aserve.models.decoder import Decoder
from aserve.request import SamplingParams
from aserve.weights.load import load_model

QWEN3 = TINY | {"model_type": "qwen3", "vocab_size": 1000, "hidden_size": 128, "head_dim": 32, "rms_norm_eps": 1e-6}
QWEN3_MOE = QWEN3 | {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
QWEN2 = TINY | {"model_type": "qwen2", "vocab_size": 1000}
GPT_OSS = QWEN3 | {"model_type": "gpt_oss", "num_local_experts": 4, "swiglu_limit": 7.0} | MXFP4
CPU = torch.device("cpu")


def write_config(folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def load(config: dict[str, Any], dtype: torch.dtype = torch.float32, quantization: str = "none") -> Decoder:
    files = ModelFiles(Path("tiny"), "random", "tiny", config=config)
    return load_model(files, device=CPU, dtype=dtype, quantization=quantization, operators=Operators()).model


def tensors_of(model: Decoder) -> dict[str, torch.Tensor]:
    return {f"{layer.name}.{key}": t for layer in model.weighted_layers() for key, t in layer.tensors.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_loads_are_equal_and_no_two_weights_are(dtype: torch.dtype) -> None:
    first, second = tensors_of(load(QWEN3, dtype)), tensors_of(load(QWEN3, dtype))
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert tensor.dtype is dtype
        assert torch.equal(tensor, second[name]), name
    starts = [
        tuple(tensor.flatten()[:8].tolist()) for name, tensor in first.items() if not name.endswith("norm.weight")
    ]
    assert len(set(starts)) == len(starts)


def test_a_tensor_does_not_depend_on_how_many_layers_there_are() -> None:
    small, large = tensors_of(load(QWEN3 | {"num_hidden_layers": 1})), tensors_of(load(QWEN3))
    assert all(torch.equal(tensor, large[name]) for name, tensor in small.items())


@pytest.mark.parametrize("config", [QWEN3, QWEN2, QWEN3_MOE, GPT_OSS], ids=["qwen3", "qwen2", "qwen3_moe", "gpt_oss"])
def test_norms_are_one_and_all_else_is_normal(config: dict[str, Any]) -> None:
    for name, tensor in tensors_of(load(config)).items():
        if name.endswith("norm.weight"):
            assert torch.equal(tensor, torch.ones_like(tensor)), name
            continue
        count = tensor.numel()
        assert tensor.mean().abs() < 5 * 0.02 / count**0.5, name
        assert abs(tensor.std() / 0.02 - 1) < 5 / (2 * count) ** 0.5, name
        # 0.27 % of a normal distribution lies beyond three standard deviations
        beyond = int((tensor.abs() > 0.06).sum())
        assert abs(beyond - 0.0027 * count) <= 5 * (0.0027 * count) ** 0.5 + 1, name


@pytest.mark.parametrize("quantization", ["none", "int8_torch"])
@pytest.mark.parametrize("num_layers", [2, 48])
def test_activations_neither_vanish_nor_explode(num_layers: int, quantization: str) -> None:
    model = load(QWEN3 | {"num_hidden_layers": num_layers}, torch.bfloat16, quantization)
    logits = PagedSequence(model, 40, torch.bfloat16).step(range(3, 40))
    assert torch.isfinite(logits).all()
    # rows of a unit-rms vector times normal(0, 0.02) rows of 128
    assert logits.std().item() == pytest.approx(0.02 * 128**0.5, rel=0.15)


def test_a_folder_with_nothing_but_a_config_is_served(tmp_path: Path) -> None:
    async def generate(prompt: Any) -> tuple[str, list[int], str]:
        config = EngineConfig(
            model=str(write_config(tmp_path / "small", QWEN3)),
            random_weights=True,
            device="cpu",
            num_threads=1,
            max_num_batched_tokens=64,
            num_pages=64,
        )
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        async with AsyncEngine(config) as engine:
            outputs = [output async for output in engine.generate(prompt, params)]
            text = "".join(output.text for output in outputs)
            return text, [i for output in outputs for i in output.token_ids], engine.model_name

    text, token_ids, name = asyncio.run(generate([{"role": "user", "content": "hi"}]))
    assert name == "small"
    assert len(token_ids) == 12
    assert len(text) >= 12
    assert asyncio.run(generate([{"role": "user", "content": "hi"}]))[1] == token_ids
    assert asyncio.run(generate([{"role": "user", "content": "ho"}]))[1] != token_ids


def locate(model: str | Path | None, **settings: Any) -> ModelFiles:
    return locate_model(EngineConfig(model=None if model is None else str(model), random_weights=True, **settings))


def test_a_built_in_config_is_found_by_name() -> None:
    files = locate("Qwen/qwen3-0.6B")
    assert (files.format, files.name) == ("random", "Qwen3-0.6B")
    assert files.config is not None
    assert files.config["hidden_size"] == 1024


def test_weights_in_the_folder_are_not_read(tmp_path: Path) -> None:
    folder = write_config(tmp_path / "m", QWEN3)
    (folder / "model.safetensors").write_bytes(b"nonsense")
    assert locate(folder).format == "random"


@pytest.mark.parametrize(
    ("model", "settings", "message"),
    [
        (
            "Qwen3-9B",
            {},
            "'Qwen3-9B' is neither; did you mean Qwen3-8B?; built in: "
            "Qwen3-0.6B, Qwen3-8B, Qwen3-14B, Qwen3-30B-A3B, Mixtral-8x7B, "
            "gpt-oss-20b, gpt-oss-120b, Llama-3.1-8B, "
            "gemma-2-9b, gemma-3-4b, gemma-3-12b, Phi-3-mini-4k, Phi-3-medium-4k",
        ),
        (None, {}, "random weights need a model"),
        ("Qwen3-8B", {"revision": "main"}, "a revision (main) makes no sense"),
    ],
)
def test_what_has_no_config_is_refused(model: str | None, settings: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        locate(model, **settings)
    assert message in str(caught.value)


@pytest.mark.parametrize("content", [None, "{", "[]"])
def test_a_folder_without_a_usable_config_is_named(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=str(tmp_path)):
        locate(tmp_path)


def test_a_built_in_name_without_the_flag_says_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--model", "Qwen3-8B"]) == 2
    assert "add --random-weights" in capsys.readouterr().err

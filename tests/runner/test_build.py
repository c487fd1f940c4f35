"""From a checkpoint to a runner: what settings lead to, what is logged and what is refused."""

import logging
from pathlib import Path

import pytest
import torch
from doubles_models import TINY, make_oracle
from doubles_runner import single_plan

from aserve.config import EngineConfig
from aserve.errors import ConfigError
from aserve.model_files import ModelFiles
from aserve.registry import Entry, Registry
from aserve.runner.build import build_runner

MAX_CONTEXT = 64  # of the tiny model


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    folder: Path = tmp_path_factory.mktemp("tiny")
    make_oracle("llama", {"num_hidden_layers": 2}, folder)
    return ModelFiles(folder, "safetensors", "tiny")


def config(**settings: object) -> EngineConfig:
    return EngineConfig(**{"device": "cpu", "dtype": "float32", "num_threads": 1} | settings)  # type: ignore[arg-type]


def test_everything_resolved_is_logged_with_a_reason(files: ModelFiles, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    runner = build_runner(EngineConfig(device="cpu"), files, frozenset({2}))
    lines = [record.getMessage() for record in caplog.records]
    for name in (
        "device", "num_threads", "quantization", "dtype", "operators", "attention_backend", "max_num_seqs",
        "num_pages", "max_model_len", "context_cost", "max_num_batched_tokens",
    ):  # fmt: skip
        (line,) = [line for line in lines if line.startswith(f"{name}=")]
        assert line.endswith(")"), line
    limits = runner.limits
    assert limits.vocab_size == 99
    assert limits.max_num_seqs == 32
    assert limits.max_model_len == MAX_CONTEXT
    assert limits.num_pages == 32 * MAX_CONTEXT // 16  # more than that nobody needs
    assert limits.max_num_batched_tokens == 16 + 16 * (MAX_CONTEXT - 1)  # so small a model is never the limit
    runner.warm_up()
    assert len(runner.launch(single_plan([1, 2, 3], page_size=16)).result(timeout=10).token_ids) == 1
    runner.close()


def test_settings_are_taken_as_they_are(files: ModelFiles) -> None:
    settings = {"max_num_seqs": 3, "max_num_batched_tokens": 7, "page_size": 1, "num_pages": 50, "max_model_len": 40}
    runner = build_runner(config(**settings), files, frozenset())
    limits = runner.limits
    assert {name: getattr(limits, name) for name in settings} == settings
    assert limits.context_cost == 0
    runner.warm_up()
    runner.close()


@pytest.mark.parametrize("max_num_seqs", [1, 2])
def test_the_smallest_sizes_there_are_can_be_served(files: ModelFiles, max_num_seqs: int) -> None:
    runner = build_runner(config(max_num_seqs=max_num_seqs, max_model_len=2, page_size=1), files, frozenset())
    assert runner.limits.max_num_batched_tokens == max_num_seqs
    runner.warm_up()
    assert len(runner.launch(single_plan([7], page_size=1)).result(timeout=10).token_ids) == 1
    runner.close()


def test_the_context_is_cut_to_the_pages(files: ModelFiles, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    runner = build_runner(config(num_pages=2, page_size=16, max_num_batched_tokens=8), files, frozenset())
    assert runner.limits.max_model_len == 32
    assert "max_model_len=32 (the model has 64, but the KV pool holds no more)" in caplog.text
    runner.close()


@pytest.mark.parametrize(
    ("settings", "factors"),
    [({}, "long"), ({"max_model_len": 32}, "short"), ({"num_pages": 2, "page_size": 16}, "short")],
)
def test_longrope_factors_follow_the_resolved_length(
    settings: dict[str, int], factors: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    lists = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    scaling = {"type": "longrope", "original_max_position_embeddings": 32} | lists
    shape = TINY | {"model_type": "phi3", "vocab_size": 1000, "rope_scaling": scaling}
    files = ModelFiles(Path("tiny"), "random", "tiny", config=shape)
    runner = build_runner(config(max_num_batched_tokens=8, **settings), files, frozenset())
    (line,) = [line for line in caplog.messages if line.startswith("rope_factors=")]
    assert line.startswith(f"rope_factors={factors} (max_model_len is ")
    runner.close()


def test_kv_memory_decides_the_pages(files: ModelFiles) -> None:
    page_bytes = 2 * 2 * 16 * 2 * 16 * 4  # key and value, 2 layers, 16 tokens, 2 heads of 16, float32
    gib = 12 * page_bytes / 2**30
    runner = build_runner(config(kv_memory_gib=gib, max_num_batched_tokens=8), files, frozenset())
    assert runner.limits.num_pages == 11  # and the dummy page
    runner.close()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_model_len": 65}, "max_model_len 65 is more than the model's context of 64"),
        ({"max_model_len": 1}, "at least 2"),
        ({"max_model_len": 64, "num_pages": 2}, "max_model_len 64 does not fit the KV pool of 32 tokens"),
        ({"kv_memory_gib": 1e-9}, "kv_memory_gib 1e-09 holds no page"),
        ({"attention_backend": "fa9"}, "unknown attention backend 'fa9'"),
        ({"attention_backend": "torch,torch,torch"}, "exactly one comma"),
        ({"kv_cache_dtype": "nvfp4"}, "kv_cache_dtype 'nvfp4' needs a head_dim that is a multiple of 32, not 16"),
        (
            {"attention_backend": "cpu", "kv_cache_dtype": "fp8"},
            "'cpu' cannot .*: it does not read float8_e4m3fn",
        ),
    ],
)
def test_what_cannot_be_is_refused_by_name(files: ModelFiles, settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_runner(config(**settings), files, frozenset())


@pytest.mark.parametrize("setting", ["fa9", "torch,fa9", "torch,", "absent"])
def test_a_backend_of_no_use_is_refused_before_weights_are_read(
    files: ModelFiles, setting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = {"torch": Entry("aserve.attention.torch_backend:TorchBackend"), "absent": Entry("x:Y", lambda: "no GPU")}
    monkeypatch.setattr("aserve.attention.registry.BACKENDS", Registry("attention backend", entries))
    monkeypatch.setattr("aserve.runner.build.load_model", lambda *_, **__: pytest.fail("weights were read"))
    with pytest.raises(ConfigError, match="attention backend"):
        build_runner(config(attention_backend=setting), files, frozenset())


def test_a_gpu_that_is_not_there_is_refused(files: ModelFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="device 'cuda' cannot be used here"):
        build_runner(config(device="cuda"), files, frozenset())


def test_a_hybrid_serves_the_same_tokens(files: ModelFiles) -> None:
    results = []
    for backend in ("torch", "torch,cpu", "cpu,torch", "auto"):
        runner = build_runner(config(attention_backend=backend, max_num_batched_tokens=64), files, frozenset())
        results.append(runner.launch(single_plan([5, 9, 33, 7], page_size=16)).result(timeout=10).token_ids)
        runner.close()
    assert all(result == results[0] for result in results)

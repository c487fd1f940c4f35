"""Safetensors folders: what loads, and every kind of incomplete or damaged folder, refused with tensor and file."""

import json
from pathlib import Path

import pytest
import torch
from doubles_models import PagedSequence, edit_config, load_folder, make_oracle
from safetensors.torch import load_file, save_file
from torch import Tensor

from aserve.errors import ConfigError, WeightsError

TOKENS = [5, 17, 42, 98, 3]
HEAD, EMBEDDINGS = "lm_head.weight", "model.embed_tokens.weight"
QUERY = "model.layers.1.self_attn.q_proj.weight"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


@pytest.fixture
def tied(tmp_path: Path) -> tuple[Path, Tensor]:
    return _checkpoint(tmp_path, is_tied=True)


@pytest.fixture
def untied(tmp_path: Path) -> tuple[Path, Tensor]:
    return _checkpoint(tmp_path, is_tied=False)


@torch.inference_mode()
def _checkpoint(folder: Path, *, is_tied: bool) -> tuple[Path, Tensor]:
    """Return (folder, the logits that transformers computes)."""
    oracle = make_oracle("llama", {"tie_word_embeddings": is_tied}, folder)
    return folder, oracle(torch.tensor([TOKENS])).logits[0]


def read(folder: Path) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in load_file(folder / "model.safetensors").items()}


def rewrite(folder: Path, tensors: dict[str, Tensor]) -> None:
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def shard(folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, str]]:
    """Split the folder's file in two; return both parts and the weight map, to be spoilt and saved again."""
    tensors = read(folder)
    (folder / "model.safetensors").unlink()
    first = {name: tensors[name] for name in sorted(tensors)[: len(tensors) // 2]}
    second = {name: tensor for name, tensor in tensors.items() if name not in first}
    weight_map = dict.fromkeys(first, SHARDS[0]) | dict.fromkeys(second, SHARDS[1])
    save_shards(folder, first, second, weight_map)
    return first, second, weight_map


def save_shards(folder: Path, first: dict[str, Tensor], second: dict[str, Tensor], weight_map: dict[str, str]) -> None:
    save_file(first, folder / SHARDS[0])
    save_file(second, folder / SHARDS[1])
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def assert_loads(folder: Path, expected: Tensor) -> None:
    logits = PagedSequence(load_folder(folder), len(TOKENS)).step(TOKENS)
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)


def assert_refused(folder: Path, *named: str) -> None:
    with pytest.raises(WeightsError) as caught:
        load_folder(folder)
    for text in named:
        assert text in str(caught.value)


def test_tied_without_head(tied: tuple[Path, Tensor]) -> None:
    folder, expected = tied
    assert HEAD not in read(folder)
    assert_loads(folder, expected)


def test_tied_with_the_same_head_again(tied: tuple[Path, Tensor]) -> None:
    folder, expected = tied
    tensors = read(folder)
    rewrite(folder, tensors | {HEAD: tensors[EMBEDDINGS].clone()})
    assert_loads(folder, expected)


@pytest.mark.parametrize("is_sharded", [False, True])
def test_tied_with_another_head_is_not_tied(tied: tuple[Path, Tensor], is_sharded: bool) -> None:
    """transformers unties such a checkpoint as well, so it is the oracle."""
    from transformers import AutoModelForCausalLM

    folder, tied_logits = tied
    tensors = read(folder)
    rewrite(folder, tensors | {HEAD: tensors[EMBEDDINGS].flip(0)})
    with torch.inference_mode():
        expected = AutoModelForCausalLM.from_pretrained(folder)(torch.tensor([TOKENS])).logits[0]
    assert not torch.allclose(expected, tied_logits)
    if is_sharded:
        shard(folder)
    assert_loads(folder, expected)


def test_untied_without_head(untied: tuple[Path, Tensor]) -> None:
    folder, _ = untied
    tensors = read(folder)
    del tensors[HEAD]
    rewrite(folder, tensors)
    assert_refused(folder, HEAD, str(folder))


def test_single_file_without_index(untied: tuple[Path, Tensor]) -> None:
    assert_loads(*untied)


def test_single_file_of_another_name(untied: tuple[Path, Tensor]) -> None:
    folder, expected = untied
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    assert_loads(folder, expected)


def test_shards_with_index(untied: tuple[Path, Tensor]) -> None:
    shard(untied[0])
    assert_loads(*untied)


def test_index_names_an_absent_shard(untied: tuple[Path, Tensor]) -> None:
    folder, _ = untied
    _, second, _ = shard(folder)
    (folder / SHARDS[1]).unlink()
    assert_refused(folder, SHARDS[1], next(iter(second)))


def test_index_places_a_tensor_in_a_file_without_it(untied: tuple[Path, Tensor]) -> None:
    folder, _ = untied
    first, second, weight_map = shard(folder)
    name = next(iter(first))
    save_shards(folder, first, second, weight_map | {name: SHARDS[1]})
    assert_refused(folder, name, SHARDS[1])


def test_file_holds_a_tensor_that_the_index_lacks(untied: tuple[Path, Tensor]) -> None:
    folder, _ = untied
    first, second, weight_map = shard(folder)
    name = next(iter(first))
    del weight_map[name]
    save_shards(folder, first, second, weight_map)
    assert_refused(folder, name, SHARDS[0])


def test_stray_copy_in_the_other_shard_is_ignored(untied: tuple[Path, Tensor]) -> None:
    folder, expected = untied
    first, second, weight_map = shard(folder)
    name, tensor = next(iter(first.items()))
    save_shards(folder, first, second | {name: torch.full_like(tensor, 7.0)}, weight_map)
    assert_loads(folder, expected)


@pytest.mark.parametrize("file_name", ["../outside.safetensors", "/etc/passwd", "model.bin"])
def test_index_may_not_leave_the_folder(untied: tuple[Path, Tensor], file_name: str) -> None:
    folder, _ = untied
    first, second, weight_map = shard(folder)
    save_shards(folder, first, second, weight_map | {QUERY: file_name})
    assert_refused(folder, QUERY, file_name, "index.json")


@pytest.mark.parametrize("kept_bytes", [0, 4, 100, -1, -1000])
def test_truncated_file(untied: tuple[Path, Tensor], kept_bytes: int) -> None:
    folder, _ = untied
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept_bytes])
    assert_refused(folder, str(file))


def test_truncated_shard(untied: tuple[Path, Tensor]) -> None:
    folder, _ = untied
    shard(folder)
    file = folder / SHARDS[1]
    file.write_bytes(file.read_bytes()[:-8])
    assert_refused(folder, str(file))


@pytest.mark.parametrize("name", [QUERY, EMBEDDINGS, "model.norm.weight", "model.layers.0.mlp.down_proj.weight"])
def test_wrong_shape(untied: tuple[Path, Tensor], name: str) -> None:
    folder, _ = untied
    tensors = read(folder)
    rewrite(folder, tensors | {name: tensors[name][:-1].clone()})
    assert_refused(folder, name, str(folder / "model.safetensors"), str(list(tensors[name].shape)))


@pytest.mark.parametrize("name", [QUERY, "model.norm.weight", EMBEDDINGS])
def test_missing_tensor(untied: tuple[Path, Tensor], name: str) -> None:
    folder, _ = untied
    tensors = read(folder)
    del tensors[name]
    rewrite(folder, tensors)
    assert_refused(folder, name, str(folder))


def test_unknown_tensor(untied: tuple[Path, Tensor]) -> None:
    """A bias that the config does not speak of would otherwise be dropped in silence."""
    folder, _ = untied
    name = "model.layers.0.self_attn.q_proj.bias"
    rewrite(folder, read(folder) | {name: torch.zeros(64)})
    assert_refused(folder, name, "model.safetensors")


def test_frequencies_kept_by_old_checkpoints_are_ignored(untied: tuple[Path, Tensor]) -> None:
    folder, expected = untied
    rewrite(folder, read(folder) | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)})
    assert_loads(folder, expected)


def test_integer_tensor(untied: tuple[Path, Tensor]) -> None:
    folder, _ = untied
    tensors = read(folder)
    rewrite(folder, tensors | {QUERY: tensors[QUERY].to(torch.int8)})
    assert_refused(folder, QUERY, "I8", "model.safetensors")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_float_types(untied: tuple[Path, Tensor], dtype: torch.dtype) -> None:
    folder, expected = untied
    tensors = {name: tensor.to(dtype) for name, tensor in read(folder).items()}
    rewrite(folder, tensors)
    if dtype is not torch.float64:
        from transformers import AutoModelForCausalLM

        with torch.inference_mode():
            oracle = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
            expected = oracle(torch.tensor([TOKENS])).logits[0]
    assert_loads(folder, expected)


def test_several_files_without_index(untied: tuple[Path, Tensor]) -> None:
    folder, _ = untied
    shard(folder)
    (folder / "model.safetensors.index.json").unlink()
    assert_refused(folder, str(folder), "2 safetensors files")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth"])
def test_pickles_are_refused(untied: tuple[Path, Tensor], name: str) -> None:
    folder, _ = untied
    torch.save(read(folder), folder / name)
    (folder / "model.safetensors").unlink()
    assert_refused(folder, name, "pickle", "safetensors")


def test_no_weights_at_all(untied: tuple[Path, Tensor]) -> None:
    folder, _ = untied
    (folder / "model.safetensors").unlink()
    assert_refused(folder, str(folder), "no safetensors file")


@pytest.mark.parametrize("content", ["{", "[]", '{"weight_map": {}}', '{"weight_map": {"a": 1}}'])
def test_damaged_index(untied: tuple[Path, Tensor], content: str) -> None:
    folder, _ = untied
    shard(folder)
    (folder / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ConfigError, match=r"index\.json"):
        load_folder(folder)


@pytest.mark.parametrize("content", [None, "{", "[]"])
def test_damaged_config(untied: tuple[Path, Tensor], content: str | None) -> None:
    folder, _ = untied
    (folder / "config.json").unlink()
    if content is not None:
        (folder / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=r"config\.json"):
        load_folder(folder)


def test_loaded_weights_do_not_depend_on_the_file(untied: tuple[Path, Tensor]) -> None:
    """Overwriting a checkpoint in place must not change a running server."""
    folder, expected = untied
    model = load_folder(folder)
    with (folder / "model.safetensors").open("r+b") as file:
        size = file.seek(0, 2)
        file.seek(0)
        file.write(bytes(size))
    torch.testing.assert_close(PagedSequence(model, len(TOKENS)).step(TOKENS), expected, rtol=0, atol=1e-4)


def test_wrong_number_of_layers(untied: tuple[Path, Tensor]) -> None:
    folder, _ = untied
    edit_config(folder, {"num_hidden_layers": 4})
    assert_refused(folder, "model.layers.3.", str(folder))
    edit_config(folder, {"num_hidden_layers": 2})
    assert_refused(folder, "model.layers.2.", "model.safetensors")

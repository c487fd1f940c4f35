"""GGUF files: tiny ones written with the gguf library, every block format, and the demo's own file."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from doubles_gguf import TinyFile, interleave_rotary_rows
from doubles_models import PagedSequence, load_folder, make_oracle, read_demo_in_transformers
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter, quants
from numpy.typing import NDArray
from torch import Tensor

from aserve.errors import ConfigError, WeightsError
from aserve.model_files import ModelFiles
from aserve.weights.gguf_file import GgufFile

TOKENS = [5, 17, 42, 98, 3, 77, 1, 60, 8]


@torch.inference_mode()
def assert_equals_oracle(tiny: TinyFile, path: Path) -> None:
    expected = tiny.oracle(torch.tensor([TOKENS])).logits[0]
    logits = PagedSequence(load_folder(tiny.write(path)), len(TOKENS)).step(TOKENS)
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)


@pytest.fixture
def tiny(tmp_path: Path) -> TinyFile:
    return TinyFile(make_oracle("llama", {}, tmp_path), "llama")


@pytest.mark.parametrize(
    ("arch", "changes"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("qwen2", {}),
        ("qwen3", {"head_dim": 16}),
        ("qwen3", {"head_dim": 24}),
    ],
)
def test_logits_equal_transformers(arch: str, changes: dict[str, Any], tmp_path: Path) -> None:
    assert_equals_oracle(TinyFile(make_oracle(arch, changes, tmp_path), arch), tmp_path / "tiny.gguf")


def test_linear_and_yarn_scaling(tmp_path: Path) -> None:
    for kind, options in (("linear", {}), ("yarn", {"original_max_position_embeddings": 16})):
        parameters = {"rope_type": kind, "factor": 4.0, "rope_theta": 500.0, **options}
        tiny = TinyFile(make_oracle("llama", {"rope_parameters": parameters}, tmp_path), "llama")
        tiny.metadata |= {"rope.scaling.type": kind, "rope.scaling.factor": 4.0}
        if options:
            tiny.metadata["rope.scaling.original_context_length"] = 16
        assert_equals_oracle(tiny, tmp_path / f"{kind}.gguf")


def test_llama3_scaling_comes_as_a_tensor(tmp_path: Path) -> None:
    parameters = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
        "rope_theta": 500.0,
    }
    tiny = TinyFile(make_oracle("llama", {"rope_parameters": parameters}, tmp_path), "llama")
    plain = 500.0 ** -(torch.arange(0, 16, 2) / 16)
    divisors = plain / tiny.oracle.model.rotary_emb.inv_freq
    assert divisors.max() > 7
    tiny.add("rope_freqs.weight", divisors.numpy())
    assert_equals_oracle(tiny, tmp_path / "tiny.gguf")


BLOCK_FORMATS = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")


def random_blocks(kind: GGMLQuantizationType, shape: tuple[int, int], seed: int) -> NDArray[np.uint8]:
    """Random bytes that are valid blocks of ``kind`` for a tensor of ``shape``: float16 scales are made small."""
    block_len, block_bytes = GGML_QUANT_SIZES[kind]
    generator = np.random.default_rng(seed)
    blocks = generator.integers(0, 256, (shape[0], shape[1] // block_len, block_bytes), dtype=np.uint8)
    scale = (
        generator.uniform(0.001, 0.01, blocks.shape[:2]).astype(np.float16).view(np.uint8).reshape(*blocks.shape[:2], 2)
    )
    start = block_bytes - 2 if kind is GGMLQuantizationType.Q6_K else 0
    blocks[..., start : start + 2] = scale
    if kind.name in ("Q4_1", "Q5_1", "Q4_K", "Q5_K"):  # a minimum follows the scale
        blocks[..., 2:4] = scale
    return blocks.reshape(shape[0], -1)


@pytest.mark.parametrize("format_name", BLOCK_FORMATS)
@pytest.mark.parametrize("stem", ["attn_q", "attn_k", "ffn_down"])
def test_block_formats_equal_the_library(format_name: str, stem: str, tiny: TinyFile, tmp_path: Path) -> None:
    kind = GGMLQuantizationType[format_name]
    name, shape = f"blk.1.{stem}.weight", (64, 256)
    blocks = random_blocks(kind, shape, seed=len(stem))
    tiny.add(name, blocks, kind)
    expected = quants.dequantize(blocks, kind)
    assert np.isfinite(expected).all()
    assert np.abs(expected).max() > 0
    read = read_tensors(tiny.write(tmp_path / "tiny.gguf"))[name].numpy()
    if stem != "ffn_down":
        read = interleave_rotary_rows(read, {"attn_q": 4, "attn_k": 2}[stem])
    np.testing.assert_array_equal(read, expected)


def test_q4_1_by_its_definition(tiny: TinyFile, tmp_path: Path) -> None:
    """Each block: scale, minimum, then 16 bytes whose low halves are values 0 to 15 and high halves 16 to 31."""
    block = np.zeros(20, dtype=np.uint8)
    block[:4] = np.array([0.5, -3.0], dtype=np.float16).view(np.uint8)
    block[4:] = np.arange(16) | ((15 - np.arange(16)) << 4)
    tiny.add("output_norm.weight", block, GGMLQuantizationType.Q4_1)
    read = read_tensors(tiny.write(tmp_path / "tiny.gguf"))["output_norm.weight"]
    numbers = [*range(16), *range(15, -1, -1)]
    assert read.tolist() == [0.5 * number - 3.0 for number in numbers]


@pytest.mark.parametrize("format_name", ["F32", "F16", "BF16"])
def test_plain_formats(format_name: str, tiny: TinyFile, tmp_path: Path) -> None:
    values = np.random.default_rng(2).standard_normal((96, 64)).astype(np.float32)
    kind = GGMLQuantizationType[format_name]
    tiny.add("blk.0.ffn_gate.weight", quants.quantize(values, kind), kind)
    read = read_tensors(tiny.write(tmp_path / "tiny.gguf"))["blk.0.ffn_gate.weight"]
    dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[format_name]
    assert torch.equal(read.float(), torch.from_numpy(values).to(dtype).float())


def read_tensors(path: Path) -> dict[str, Tensor]:
    return {stored.label: stored.read() for stored in GgufFile(path).tensors()}


def test_unsupported_type_names_tensor_and_file(tiny: TinyFile, tmp_path: Path) -> None:
    tiny.add("blk.0.ffn_gate.weight", np.zeros((96, 64), dtype=np.int32), GGMLQuantizationType.I32)
    with pytest.raises(WeightsError, match=r"blk\.0\.ffn_gate\.weight in .*tiny\.gguf .* I32"):
        load_folder(tiny.write(tmp_path / "tiny.gguf"))


@pytest.mark.parametrize("name", ["blk.2.ffn_up.weight", "output_norm.weight", "token_embd.weight"])
def test_missing_tensor(name: str, tiny: TinyFile, tmp_path: Path) -> None:
    del tiny.tensors[name]
    tiny.metadata["vocab_size"] = 99
    with pytest.raises(WeightsError, match=r"missing from .*tiny\.gguf"):
        load_folder(tiny.write(tmp_path / "tiny.gguf"))


def test_unknown_tensor(tiny: TinyFile, tmp_path: Path) -> None:
    tiny.add("blk.0.attn_sinks.weight", np.zeros(4, dtype=np.float32))
    with pytest.raises(WeightsError, match=r"blk\.0\.attn_sinks\.weight in .*tiny\.gguf"):
        load_folder(tiny.write(tmp_path / "tiny.gguf"))


def test_wrong_shape(tiny: TinyFile, tmp_path: Path) -> None:
    tiny.add("blk.0.ffn_down.weight", np.zeros((64, 95), dtype=np.float32))
    with pytest.raises(WeightsError, match=r"blk\.0\.ffn_down\.weight in .*tiny\.gguf .*\[64, 95\].*\[64, 96\]"):
        load_folder(tiny.write(tmp_path / "tiny.gguf"))


def test_cut_file(tiny: TinyFile, tmp_path: Path) -> None:
    path = tiny.write(tmp_path / "tiny.gguf")
    path.write_bytes(path.read_bytes()[:-5000])
    with pytest.raises(WeightsError, match=r"tiny\.gguf"):
        load_folder(path)


def test_split_files_are_refused(tiny: TinyFile, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    tiny.write(path)
    writer = GGUFWriter(path, "llama")
    writer.add_uint16("split.count", 3)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ConfigError, match="one of 3 parts"):
        load_folder(path)


def test_all_demo_tensors_equal_transformers(demo_files: ModelFiles) -> None:
    _, expected = read_demo_in_transformers(demo_files.path)
    checkpoint = GgufFile(demo_files.path)
    read = {stored.name for stored in checkpoint.tensors()}
    assert read == set(expected)
    assert len(read) == 272
    for stored in checkpoint.tensors():
        assert torch.equal(stored.read().float(), expected[stored.name].float()), stored.label
    assert checkpoint.config.is_head_tied

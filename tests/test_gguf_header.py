"""The header reader against the gguf library's own reader, and against damaged files."""

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest

from aserve.errors import WeightsError
from aserve.gguf_header import GgufHeader, read_gguf_header
from aserve.model_files import ModelFiles


def assert_equals_library(header: GgufHeader, path: Path) -> None:
    reader = gguf.GGUFReader(path)
    fields = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    assert header.metadata == fields
    assert header.version == reader.fields["GGUF.version"].contents()
    assert header.data_offset == reader.data_offset
    assert list(header.tensors) == [tensor.name for tensor in reader.tensors]
    for tensor in reader.tensors:
        ours = header.tensors[tensor.name]
        assert ours.shape == tuple(reversed(tensor.shape.tolist()))
        assert (ours.type, ours.offset, ours.num_bytes) == (tensor.tensor_type, tensor.data_offset, tensor.n_bytes)


def write_small_gguf(path: Path, alignment: int | None = None) -> Path:
    """Write a file with each kind of value that the library can write, and three tensors."""
    writer = gguf.GGUFWriter(path, "llama")
    if alignment:
        writer.add_custom_alignment(alignment)
    writer.add_uint8("a.uint8", 255)
    writer.add_int8("a.int8", -128)
    writer.add_uint16("a.uint16", 65535)
    writer.add_int16("a.int16", -5)
    writer.add_int32("a.int32", -(2**31))
    writer.add_uint64("a.uint64", 2**64 - 1)
    writer.add_int64("a.int64", -(2**63))
    writer.add_float32("a.float32", 1.5)
    writer.add_float64("a.float64", 0.1)
    writer.add_bool("a.bool", True)
    writer.add_string("a.string", "žluťoučký 😀")
    writer.add_array("a.strings", ["", "x", "š", "\u2028"])
    writer.add_array("a.ints", [1, -2, 3])
    writer.add_array("a.floats", [0.5, -0.25])
    writer.add_array("a.bools", [True, False])
    writer.add_tensor("f32", np.arange(6, dtype=np.float32).reshape(2, 3))
    writer.add_tensor("f16", np.ones((2, 3, 4), dtype=np.float16))
    q8_0 = gguf.quants.quantize(np.ones((4, 64), dtype=np.float32), gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("q8_0", q8_0, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def small_gguf(tmp_path: Path) -> Path:
    return write_small_gguf(tmp_path / "small.gguf")


def test_demo_header_equals_the_library_reader(demo_files: ModelFiles) -> None:
    header = read_gguf_header(demo_files.path)
    assert_equals_library(header, demo_files.path)
    # facts in cases.md, read by others
    assert header.metadata["llama.block_count"] == 30
    assert header.metadata["tokenizer.ggml.eos_token_id"] == 2
    assert header.tensors["token_embd.weight"].shape == (49152, 576)


@pytest.mark.parametrize("alignment", [None, 64, 4096])
def test_every_kind_of_value_equals_the_library_reader(tmp_path: Path, alignment: int | None) -> None:
    path = write_small_gguf(tmp_path / "small.gguf", alignment)
    assert_equals_library(read_gguf_header(path), path)


def test_tensor_bytes_are_where_the_header_says(small_gguf: Path) -> None:
    tensor = read_gguf_header(small_gguf).tensors["f32"]
    data = small_gguf.read_bytes()[tensor.offset : tensor.offset + tensor.num_bytes]
    assert np.frombuffer(data, np.float32).reshape(tensor.shape).tolist() == [[0, 1, 2], [3, 4, 5]]


def test_a_file_cut_anywhere_is_refused(small_gguf: Path, tmp_path: Path) -> None:
    header = read_gguf_header(small_gguf)
    data = small_gguf.read_bytes()
    last_byte = max(tensor.offset + tensor.num_bytes for tensor in header.tensors.values())
    cut = tmp_path / "cut.gguf"
    for length in [*range(header.data_offset), last_byte - 1]:
        cut.write_bytes(data[:length])
        with pytest.raises(WeightsError, match=r"magic|cut short|past the file"):
            read_gguf_header(cut)
    cut.write_bytes(data[:last_byte])
    assert read_gguf_header(cut) == header


def header_bytes(*parts: bytes, version: int = 3, num_tensors: int = 0, num_keys: int = 0) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_keys) + b"".join(parts)


def string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def tensor_info(name: bytes, shape: tuple[int, ...], type_code: int, offset: int = 0) -> bytes:
    return string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, type_code, offset)


U32, STRING, ARRAY = 4, 8, 9


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "magic"),
        (b"PK\x03\x04" + bytes(100), "magic"),
        (header_bytes(version=1), "version 1 is not supported"),
        (header_bytes(version=4), "version 4 is not supported"),
        (header_bytes(version=0x03000000), "big-endian"),
        (header_bytes(num_keys=2**63), "cut short"),
        (header_bytes(num_tensors=2**63), "cut short"),
        (header_bytes(struct.pack("<Q", 2**64 - 1), num_keys=1), "cut short"),
        (header_bytes(string(b"\xff"), num_keys=1), "not UTF-8"),
        (header_bytes(string(b"k"), struct.pack("<I", 13), num_keys=1), "unknown type 13"),
        (header_bytes(string(b"k"), struct.pack("<IIQ", ARRAY, U32, 2**62), num_keys=1), "cut short"),
        (header_bytes(string(b"k"), struct.pack("<IIQ", ARRAY, STRING, 2**62), num_keys=1), "cut short"),
        (header_bytes(string(b"k"), struct.pack("<IIQQ", ARRAY, STRING, 2, 2**63), bytes(16), num_keys=1), "cut short"),
        (header_bytes(string(b"k"), struct.pack("<I", ARRAY), struct.pack("<IQ", ARRAY, 1) * 9, num_keys=1), "type 9"),
        (header_bytes(*[string(b"k") + struct.pack("<II", U32, 7)] * 2, num_keys=2), "'k' occurs twice"),
        (header_bytes(*[tensor_info(b"t", (4,), 0)] * 2, bytes(64), num_tensors=2), "'t' occurs twice"),
        (header_bytes(tensor_info(b"t", (1,) * 5, 0), bytes(64), num_tensors=1), "5 dimensions"),
        (header_bytes(tensor_info(b"t", (32,), 9999), bytes(64), num_tensors=1), "'t' has the unknown type 9999"),
        (header_bytes(tensor_info(b"t", (33, 2), 8), bytes(999), num_tensors=1), "whole blocks of 32"),
        (header_bytes(tensor_info(b"t", (2**40, 2**40), 0), bytes(64), num_tensors=1), "past the file"),
        (header_bytes(tensor_info(b"t", (4,), 0, 2**63), bytes(64), num_tensors=1), "past the file"),
        (header_bytes(string(b"general.alignment"), struct.pack("<II", U32, 48), num_keys=1), "power of two, got 48"),
        (header_bytes(string(b"general.alignment"), struct.pack("<II", U32, 0), num_keys=1), "power of two, got 0"),
    ],
)
def test_damaged_headers_are_refused_with_the_reason(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(data)
    with pytest.raises(WeightsError, match=message) as caught:
        read_gguf_header(path)
    assert str(path) in str(caught.value)


def test_nested_arrays(tmp_path: Path) -> None:
    path = tmp_path / "nested.gguf"
    inner = struct.pack("<IQII", U32, 2, 1, 2) + struct.pack("<IQI", U32, 1, 3)
    path.write_bytes(header_bytes(string(b"k"), struct.pack("<IIQ", ARRAY, ARRAY, 2), inner, num_keys=1))
    assert read_gguf_header(path).metadata == {"k": [[1, 2], [3]]}


def test_a_missing_file_is_a_weights_error(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="cannot read"):
        read_gguf_header(tmp_path / "none.gguf")
    with pytest.raises(WeightsError, match="cannot read"):
        read_gguf_header(tmp_path)

"""The header of a GGUF file: its metadata and where each tensor's bytes lie; reads no weights.

The ``gguf`` library's reader makes an array object for every string, which costs seconds for a
vocabulary; this one walks the header once. Types and block sizes are the library's own tables.
"""

import math
import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from gguf.constants import (
    GGML_QUANT_SIZES,
    GGUF_DEFAULT_ALIGNMENT,
    GGUF_VERSION,
    GGMLQuantizationType,
    GGUFValueType,
)

from aserve.errors import WeightsError

MAGIC = b"GGUF"
SUPPORTED_VERSIONS = (2, GGUF_VERSION)
MAX_DIMENSIONS = 4
MAX_ARRAY_DEPTH = 4

SCALAR_FORMATS = {
    GGUFValueType.UINT8: "B",
    GGUFValueType.INT8: "b",
    GGUFValueType.UINT16: "H",
    GGUFValueType.INT16: "h",
    GGUFValueType.UINT32: "I",
    GGUFValueType.INT32: "i",
    GGUFValueType.FLOAT32: "f",
    GGUFValueType.BOOL: "?",
    GGUFValueType.UINT64: "Q",
    GGUFValueType.INT64: "q",
    GGUFValueType.FLOAT64: "d",
}


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Where one tensor lies: ``shape`` in torch's order, outermost first; ``offset`` in bytes from the file's start."""

    shape: tuple[int, ...]
    type: GGMLQuantizationType
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """Metadata and tensors in file order. ``data_offset`` is where tensor data starts, in bytes."""

    version: int
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]
    data_offset: int


def read_gguf_header(path: str | Path) -> GgufHeader:
    """Read the header of the little-endian GGUF file (version 2 or 3) at ``path``.

    Raises WeightsError if the file cannot be read, is damaged or cut short, or holds what is not supported.
    """
    try:
        with Path(path).open("rb") as file:
            if file.read(len(MAGIC)) != MAGIC:
                raise WeightsError("it does not start with the GGUF magic")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as buffer:
                return _Parser(buffer).parse()
    except OSError as error:
        raise WeightsError(f"cannot read {path}: {error.strerror or error}") from error
    except WeightsError as error:
        raise WeightsError(f"{path} is not a usable GGUF file: {error}") from None
    except UnicodeDecodeError as error:
        raise WeightsError(f"{path} is not a usable GGUF file: a string is not UTF-8") from error


class _Parser:
    """A position in the mapped file and the readers that move it forward."""

    def __init__(self, buffer: mmap.mmap) -> None:
        self._buffer = buffer
        self._size = len(buffer)
        self._position = len(MAGIC)

    def parse(self) -> GgufHeader:
        version = self._read_version()
        num_tensors, num_keys = self._read("QQ")
        metadata = self._read_unique("metadata key", num_keys, self._read_value)
        # A tensor's bytes can only be placed once all of the infos have been read.
        infos = self._read_unique("tensor", num_tensors, self._read_tensor_info)
        alignment = self._check_alignment(metadata.get("general.alignment", GGUF_DEFAULT_ALIGNMENT))
        data_offset = -(-self._position // alignment) * alignment
        tensors = {name: self._place(name, info, data_offset) for name, info in infos.items()}
        return GgufHeader(version, metadata, tensors, data_offset)

    def _read(self, formats: str) -> tuple[Any, ...]:
        """Read consecutive little-endian numbers."""
        layout = struct.Struct("<" + formats)
        end = self._position + layout.size
        if end > self._size:
            raise WeightsError(f"it is cut short at byte {self._size}")
        values = layout.unpack_from(self._buffer, self._position)
        self._position = end
        return values

    def _read_version(self) -> int:
        (version,) = self._read("I")
        if version not in SUPPORTED_VERSIONS:
            hint = " (it is big-endian)" if version & 0xFFFF == 0 and version else ""
            raise WeightsError(f"version {version} is not supported{hint}; known: 2, 3")
        return int(version)

    def _read_unique(self, kind: str, count: int, read_one: Callable[[], Any]) -> dict[str, Any]:
        entries: dict[str, Any] = {}
        for _ in range(count):
            name = self._read_string()
            if name in entries:
                raise WeightsError(f"{kind} {name!r} occurs twice")
            entries[name] = read_one()
        return entries

    def _read_string(self) -> str:
        (length,) = self._read("Q")
        end = self._position + length
        if end > self._size:
            raise WeightsError(f"it is cut short at byte {self._size}")
        text = self._buffer[self._position : end].decode()
        self._position = end
        return text

    def _read_value(self) -> Any:
        (type_code,) = self._read("I")
        return self._value_reader(type_code)()

    def _value_reader(self, type_code: int, depth: int = 0) -> Callable[[], Any]:
        if type_code == GGUFValueType.STRING:
            return self._read_string
        if type_code == GGUFValueType.ARRAY and depth < MAX_ARRAY_DEPTH:
            return partial(self._read_array, depth + 1)
        if type_code in SCALAR_FORMATS:
            letter = SCALAR_FORMATS[GGUFValueType(type_code)]
            return lambda: self._read(letter)[0]
        raise WeightsError(f"a metadata value has the unknown type {type_code}")

    def _read_array(self, depth: int) -> list[Any]:
        type_code, length = self._read("IQ")
        if length > self._size - self._position:  # an element takes at least one byte
            raise WeightsError(f"it is cut short at byte {self._size}")
        if type_code == GGUFValueType.STRING:
            return self._read_strings(length)
        if type_code in SCALAR_FORMATS:
            return list(self._read(f"{length}{SCALAR_FORMATS[GGUFValueType(type_code)]}"))
        read_one = self._value_reader(type_code, depth)
        return [read_one() for _ in range(length)]

    def _read_strings(self, count: int) -> list[str]:
        """Read an array of strings; vocabularies have hundreds of thousands, so the loop is bare."""
        buffer, position, unpack = self._buffer, self._position, struct.Struct("<Q").unpack_from
        texts = []
        for _ in range(count):
            start = position + 8
            if start > self._size or (position := start + unpack(buffer, position)[0]) > self._size:
                raise WeightsError(f"it is cut short at byte {self._size}")
            texts.append(buffer[start:position].decode())
        self._position = position
        return texts

    def _check_alignment(self, alignment: Any) -> int:
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise WeightsError(f"general.alignment must be a power of two, got {alignment!r}")
        return alignment

    def _read_tensor_info(self) -> tuple[tuple[int, ...], int, int]:
        """Return (shape outermost first, type code, offset from the start of tensor data)."""
        (num_dimensions,) = self._read("I")
        if num_dimensions > MAX_DIMENSIONS:
            raise WeightsError(f"a tensor has {num_dimensions} dimensions")
        shape = self._read(f"{num_dimensions}Q")
        type_code, offset = self._read("IQ")
        return shape[::-1], type_code, offset

    def _place(self, name: str, info: tuple[tuple[int, ...], int, int], data_offset: int) -> GgufTensor:
        shape, type_code, offset = info
        try:
            tensor_type = GGMLQuantizationType(type_code)
            block_len, block_bytes = GGML_QUANT_SIZES[tensor_type]
        except (ValueError, KeyError):
            raise WeightsError(f"tensor {name!r} has the unknown type {type_code}") from None
        if shape and shape[-1] % block_len:
            raise WeightsError(f"tensor {name!r} of shape {shape} has rows that are not whole blocks of {block_len}")
        num_bytes = math.prod(shape) // block_len * block_bytes
        start = data_offset + offset
        if start + num_bytes > self._size:
            raise WeightsError(f"tensor {name!r} ends at byte {start + num_bytes}, past the file's {self._size} bytes")
        return GgufTensor(shape, tensor_type, start, num_bytes)

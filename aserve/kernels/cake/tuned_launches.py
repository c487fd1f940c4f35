"""Launches measured on a GPU, in a file named after it; they take the place of those in the tables of variants.

A GPU without a file of its own gets those of GPUs with as much shared memory, if there are such; what neither file
names stays as the table has it. ``python -m aserve.kernels.cake.tune`` writes the file of a GPU.
"""

import re
import tomllib
from dataclasses import fields, replace
from pathlib import Path
from typing import TypeVar

from aserve.kernels.cake.architectures import SHARED_BYTES
from aserve.kernels.cake.variant import Variant

FOLDER = Path(__file__).with_name("tuned")


AnyVariant = TypeVar("AnyVariant", bound=Variant)


def tune_rows(rows: tuple[AnyVariant, ...], gpu_name: str, capability: tuple[int, int]) -> tuple[AnyVariant, ...]:
    """Return ``rows`` with the launches that the files have for a GPU, "NVIDIA H200", say.

    Raises ValueError for a file whose launches do not fit the rows' parameters.
    """
    launches: dict[str, dict[str, int]] = {}
    for name in (_shared_name(capability), file_name(gpu_name)):
        path = FOLDER / name
        if path.exists():
            launches |= read_launches(path)
    return tuple(_tune(row, launches[row.name]) if row.name in launches else row for row in rows)


def read_launches(path: Path) -> dict[str, dict[str, int]]:
    """Return the launches of a file by the names of their rows."""
    tables: dict[str, dict[str, int]] = tomllib.loads(path.read_text(encoding="utf-8"))
    return tables


def file_name(gpu_name: str) -> str:
    """'nvidia-h200.toml' for "NVIDIA H200"."""
    return re.sub(r"[^a-z0-9]+", "-", gpu_name.lower()).strip("-") + ".toml"


def format_launches(launches: dict[str, dict[str, int]], comment: str) -> str:
    """Return the content of a file with ``launches``, by the names of their rows."""
    parts = [f"# {comment}\n"]
    for name, values in launches.items():
        lines = [f"{key} = {value}\n" for key, value in values.items()]
        parts.append(f"\n[{name}]\n{''.join(lines)}")
    return "".join(parts)


def _shared_name(capability: tuple[int, int]) -> str:
    return f"shared-{SHARED_BYTES.get(capability, 0) >> 10}-kib.toml"


def _tune(row: AnyVariant, values: dict[str, int]) -> AnyVariant:
    if row.launch is None:
        raise ValueError(f"{row.name}: nothing can be chosen of its launch")
    known = [field.name for field in fields(row.launch)]
    if wrong := [name for name, value in values.items() if name not in known or type(value) is not int or value < 1]:
        raise ValueError(f"{row.name}: {wrong[0]} = {values[wrong[0]]!r}; known, positive integers: {', '.join(known)}")
    return replace(row, launch=replace(row.launch, **values))

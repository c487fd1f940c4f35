"""The family's records declare nothing that no code reads."""

import ast
import dataclasses
import importlib
from pathlib import Path

import pytest

import aserve

PACKAGE = Path(aserve.__file__).parent
CAKE = PACKAGE / "kernels" / "cake"
READERS = [*CAKE.glob("*.py"), *(PACKAGE / "attention").glob("cake*.py"), PACKAGE / "commands" / "check_variants.py"]


def records() -> list[type]:
    """The dataclasses of the package: rows, launches, problems, choices, calls, plans."""
    found = []
    for path in sorted(CAKE.glob("*.py")):
        module = importlib.import_module(f"aserve.kernels.cake.{path.stem}")
        found += [
            value
            for value in vars(module).values()
            if isinstance(value, type) and dataclasses.is_dataclass(value) and value.__module__ == module.__name__
        ]
    return found


def attributes_read(source: str) -> set[str]:
    """The names of attributes that ``source`` reads, ``self``'s too."""
    nodes = ast.walk(ast.parse(source))
    return {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)}


READ = set[str]().union(*(attributes_read(path.read_text(encoding="utf-8")) for path in READERS))


@pytest.mark.parametrize("record", records(), ids=lambda record: record.__name__)
def test_every_field_is_read_by_something(record: type) -> None:
    unread = {field.name for field in dataclasses.fields(record)} - READ
    assert not unread


def test_a_field_that_is_only_written_counts_as_unread() -> None:
    read = attributes_read("row.name = launch.num_warps\nvariant(name=1, head_dims=2)\ndel row.max_group")
    assert read == {"num_warps"}


def test_the_records_are_found() -> None:
    names = {record.__name__ for record in records()}
    assert {"Variant", "DecodeVariant", "SplitLaunch", "VariantProblem", "Choice", "AttentionCall"} <= names

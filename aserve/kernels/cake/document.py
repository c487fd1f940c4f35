"""``python -m aserve.kernels.cake.document FILE``: writes the family's tables into a document, between its markers.

What stands between ``<!-- table: NAME -->`` and ``<!-- end -->`` is replaced by the table of that name. With
``--check`` nothing is written, and the exit code says whether it would be another text.
"""

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path

import torch

from aserve.kernels.cake.architectures import SHARED_BYTES
from aserve.kernels.cake.tables import TABLES
from aserve.kernels.cake.tuned_launches import FOLDER, read_launches
from aserve.kernels.cake.variant import Launch, Variant
from aserve.kernels.nvfp4 import HEAD_GRAIN, NVFP4

MARKED = re.compile(r"(<!-- table: (.+?) -->\n).*?(<!-- end -->)", re.DOTALL)
SHORT_NAMES = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.float8_e4m3fn: "e4m3",
    NVFP4: "nvfp4",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Write or check; returns 1 if a checked document is out of date."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--check", action="store_true", help="write nothing")
    arguments = parser.parse_args(argv)
    text = arguments.file.read_text(encoding="utf-8")
    filled = fill_tables(text)
    if not arguments.check:
        arguments.file.write_text(filled, encoding="utf-8")
        return 0
    return int(filled != text)


def fill_tables(text: str) -> str:
    """Return ``text`` with what stands between its markers replaced; raises ValueError for a table of unknown name."""
    return MARKED.sub(lambda match: match[1] + format_part(match[2]) + match[3], text)


def format_part(name: str) -> str:
    """Return the lines of the table called ``name``."""
    parts: dict[str, Callable[[], str]] = {
        **{kind: lambda rows=rows: format_variants(rows) for kind, rows in TABLES.items()},  # type: ignore[misc]
        "architectures": format_architectures,
        "launch files": format_files,
    }
    if name not in parts:
        raise ValueError(f"there is no table {name!r}; known: {', '.join(parts)}")
    return parts[name]()


def format_variants(rows: tuple[Variant, ...]) -> str:
    """Return a table of what each row serves and how it is launched, and how many there are."""
    num_exact = sum(row.is_exact for row in rows)
    lines = [f"{len(rows)} rows, {num_exact} of them exact.", "", *_heading("row", "queries on keys", "head_dim",
             "heads per KV head", "only", "launch")]  # fmt: skip
    return _join([*lines, *(_line(f"`{row.name}`", *_cells(row)) for row in rows)])


def format_architectures() -> str:
    """Return what a program can have of each GPU."""
    lines = [_line(".".join(map(str, capability)), f"{given >> 10} KiB") for capability, given in SHARED_BYTES.items()]
    return _join([*_heading("compute capability", "shared memory of a program"), *lines])


def format_files() -> str:
    """Return which files of launches are shipped, and for which rows."""
    lines = [_line(f"`{path.name}`", ", ".join(read_launches(path))) for path in sorted(FOLDER.glob("*.toml"))]
    return _join([*_heading("file", "rows"), *lines])


def _cells(row: Variant) -> list[str]:
    pairs = ", ".join(f"{SHORT_NAMES[dtype]} on {SHORT_NAMES[kv_dtype]}" for dtype, kv_dtype in row.dtypes)
    sizes = row.head_dims
    head_dims = f"{sizes[0]} to {sizes[-1]}" if isinstance(sizes, range) else ", ".join(map(str, sizes))
    limits = [
        f"{count} {what} at most"
        for count, what in ((row.max_keys, "keys seen"), (row.max_seqs, "sequences a step"))
        if count is not None
    ]
    if any(kv_dtype == NVFP4 for _, kv_dtype in row.dtypes) and any(size % HEAD_GRAIN for size in sizes):
        limits.append(f"multiples of {HEAD_GRAIN} on nvfp4")
    if not row.writes_lse:
        limits.append("no log-sum-exp")
    return [pairs, head_dims, f"up to {row.max_group}", "; ".join(limits), _describe_launch(row.launch)]


def _describe_launch(launch: Launch | None) -> str:
    if launch is None:
        return "fixed"
    return ", ".join(f"{field.name} {getattr(launch, field.name)}" for field in fields(launch))


def _heading(*titles: str) -> list[str]:
    return [_line(*titles), _line(*["---"] * len(titles))]


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _join(lines: list[str]) -> str:
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())

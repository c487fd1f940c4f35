"""The tables of docs/kernels.md are those of the code."""

from pathlib import Path

import pytest
import torch

from aserve.kernels.cake.decode_variants import DecodeVariant
from aserve.kernels.cake.document import fill_tables, format_variants, main
from aserve.kernels.cake.split_launch import SplitLaunch
from aserve.kernels.cake.tables import TABLES
from aserve.kernels.nvfp4 import NVFP4

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "kernels.md"


def test_the_committed_document_is_what_is_generated() -> None:
    """If not: ``python -m aserve.kernels.cake.document docs/kernels.md``."""
    assert main([str(DOCUMENT), "--check"]) == 0


def test_every_row_stands_in_it_once() -> None:
    lines = DOCUMENT.read_text(encoding="utf-8").splitlines()
    for rows in TABLES.values():
        for row in rows:
            assert sum(line.startswith(f"| `{row.name}` |") for line in lines) == 1, row.name


def test_a_row_says_all_that_it_serves() -> None:
    half, fp8 = torch.float16, torch.float8_e4m3fn
    rows = (
        DecodeVariant("a", ((half, half), (half, fp8)), (64, 80), 8, SplitLaunch(32, 4, 3, 2, 1), max_keys=5),
        DecodeVariant("b", ((half, half),), range(1, 9), 1, None, writes_lse=False, max_seqs=4),
        DecodeVariant("c", ((half, half),), (8,), 1, None),
        DecodeVariant("d", ((half, NVFP4),), range(30, 65), 1, None),
        DecodeVariant("e", ((half, NVFP4),), (96, 128), 1, None),
    )
    assert format_variants(rows).splitlines() == [
        "5 rows, 2 of them exact.",
        "",
        "| row | queries on keys | head_dim | heads per KV head | only | launch |",
        "| --- | --- | --- | --- | --- | --- |",
        "| `a` | fp16 on fp16, fp16 on e4m3 | 64, 80 | up to 8 | 5 keys seen at most | block_len 32, num_warps 4, "
        "num_stages 3, programs_per_sm 2, min_units 1 |",
        "| `b` | fp16 on fp16 | 1 to 8 | up to 1 | 4 sequences a step at most; no log-sum-exp | fixed |",
        "| `c` | fp16 on fp16 | 8 | up to 1 |  | fixed |",
        "| `d` | fp16 on nvfp4 | 30 to 64 | up to 1 | multiples of 32 on nvfp4 | fixed |",
        "| `e` | fp16 on nvfp4 | 96, 128 | up to 1 |  | fixed |",
    ]


def test_what_is_out_of_date_is_noticed_and_mended(tmp_path: Path) -> None:
    file = tmp_path / "kernels.md"
    file.write_text("before\n<!-- table: architectures -->\nold\n<!-- end -->\nafter\n")
    assert main([str(file), "--check"]) == 1
    assert "old" in file.read_text()
    assert main([str(file)]) == 0
    assert main([str(file), "--check"]) == 0
    text = file.read_text()
    assert text.startswith("before\n<!-- table: architectures -->\n| compute capability |")
    assert "| 9.0 | 227 KiB |\n" in text
    assert text.endswith("<!-- end -->\nafter\n")


def test_a_table_of_another_name_is_refused() -> None:
    with pytest.raises(ValueError, match="there is no table 'encode'; known: decode, "):
        fill_tables("<!-- table: encode -->\n<!-- end -->\n")

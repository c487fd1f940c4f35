"""Launches that files give to the rows of the tables, by the GPU's name and by its shared memory."""

import dataclasses
from pathlib import Path

import pytest

from aserve.kernels.cake import tuned_launches
from aserve.kernels.cake.architectures import SHARED_BYTES
from aserve.kernels.cake.decode_variants import DECODE_VARIANTS
from aserve.kernels.cake.split_launch import SplitLaunch
from aserve.kernels.cake.tables import TABLES, variant_names
from aserve.kernels.cake.tuned_launches import FOLDER, file_name, format_launches, read_launches, tune_rows
from aserve.kernels.nvfp4 import element_bytes

ROWS = DECODE_VARIANTS[:2]
HOPPER, ADA = (9, 0), (8, 9)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tuned_launches, "FOLDER", tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("gpu_name", "expected"),
    [
        ("NVIDIA H200", "nvidia-h200.toml"),
        ("NVIDIA A100-SXM4-80GB", "nvidia-a100-sxm4-80gb.toml"),
        ("NVIDIA GeForce RTX 4090 (test)", "nvidia-geforce-rtx-4090-test.toml"),
    ],
)
def test_a_file_is_named_after_its_gpu(gpu_name: str, expected: str) -> None:
    assert file_name(gpu_name) == expected


def test_the_file_of_the_gpu_goes_before_that_of_its_shared_memory_and_that_before_the_table(folder: Path) -> None:
    (first, second), usual = ROWS, "block_len = 32\nnum_warps = 8\n"
    (folder / "shared-99-kib.toml").write_text(f"[{first.name}]\n{usual}[{second.name}]\n{usual}")
    (folder / "nvidia-x.toml").write_text(f"[{second.name}]\nnum_stages = 7\n")
    assert tune_rows(ROWS, "NVIDIA Y", HOPPER) == ROWS
    assert first.launch is not None
    assert second.launch is not None
    shared = tuple(
        dataclasses.replace(row, launch=dataclasses.replace(row.launch, block_len=32, num_warps=8)) for row in ROWS
    )
    assert tune_rows(ROWS, "NVIDIA Y", ADA) == shared
    own = dataclasses.replace(second, launch=dataclasses.replace(second.launch, num_stages=7))
    assert tune_rows(ROWS, "NVIDIA X", HOPPER) == (first, own)
    assert tune_rows(ROWS, "NVIDIA X", ADA) == (shared[0], own)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("block_size = 32", "block_size = 32; known, positive integers: block_len, num_warps"),
        ("block_len = 0", "block_len = 0; known, positive integers"),
        ("block_len = true", "block_len = True; known, positive integers"),
        ("block_len = 1.5", "block_len = 1.5; known, positive integers"),
    ],
)
def test_what_a_launch_does_not_have_is_refused_by_name(folder: Path, line: str, words: str) -> None:
    (folder / "nvidia-x.toml").write_text(f"[{ROWS[0].name}]\n{line}\n")
    with pytest.raises(ValueError, match=f"{ROWS[0].name}: {words}"):
        tune_rows(ROWS, "NVIDIA X", HOPPER)


def test_the_plain_kernel_has_no_launch(folder: Path) -> None:
    (folder / "nvidia-x.toml").write_text("[decode-plain]\nblock_len = 32\n")
    with pytest.raises(ValueError, match="decode-plain: nothing can be chosen"):
        tune_rows(DECODE_VARIANTS, "NVIDIA X", HOPPER)


def test_what_is_written_is_read_again(folder: Path) -> None:
    launch = SplitLaunch(32, 8, 3, 1, 2)
    text = format_launches({ROWS[0].name: dataclasses.asdict(launch)}, "Measured.")
    (folder / "nvidia-x.toml").write_text(text)
    assert tune_rows(ROWS, "NVIDIA X", HOPPER) == (dataclasses.replace(ROWS[0], launch=launch), ROWS[1])


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.toml")), ids=lambda path: path.stem)
def test_what_is_shipped_names_rows_and_fits(path: Path) -> None:
    """On GPUs with as much shared memory as the file says, or on the one it is named after."""
    assert set(read_launches(path)) <= set(variant_names())
    kib = int(path.stem.split("-")[1]) if path.stem.startswith("shared-") else SHARED_BYTES[HOPPER] >> 10
    capability = next(capability for capability, given in SHARED_BYTES.items() if given == kib << 10)
    gpu_name = "" if path.stem.startswith("shared-") else path.stem
    for variants in TABLES.values():
        for row in tune_rows(variants, gpu_name, capability):
            if row.launch is not None:
                for dtypes in row.dtypes:
                    needed = row.launch.shared_bytes(row.head_dims[-1], row.max_group, element_bytes(dtypes[1]))
                    assert needed <= kib << 10, row


def test_an_h200_is_launched_as_it_was_measured() -> None:
    rows = {row.name: row.launch for row in tune_rows(DECODE_VARIANTS, "NVIDIA H200", HOPPER)}
    assert rows["decode-16-d64"] == SplitLaunch(128, 4, 5, 2)
    assert rows["decode-16-d128"] == SplitLaunch(64, 4, 5, 2)
    assert rows["decode-16-d256"] == SplitLaunch(32, 4, 5, 2)
    assert rows["decode-8-d64"] == SplitLaunch(128, 2, 3, 4)
    assert rows["decode-8-d128"] == SplitLaunch(128, 2, 2, 4)
    assert rows["decode-8-d256"] == SplitLaunch(64, 4, 5, 2)
    assert rows["decode-4-d64"] == SplitLaunch(128, 2, 4, 6)
    assert rows["decode-4-d128"] == SplitLaunch(128, 2, 2, 4)

"""What the compiler makes of the cake family for a Hopper GPU, for which none is needed."""

from pathlib import Path
from typing import Any

import pytest
from doubles_hopper import compile_by

from aserve.kernels.cake.architectures import SHARED_BYTES
from aserve.kernels.cake.decode_variants import DECODE_VARIANTS, SEVERAL_VARIANTS
from aserve.kernels.cake.prefill_variants import PREFILL_VARIANTS
from aserve.kernels.nvfp4 import element_bytes

CHUNKS_SCRIPT = Path(__file__).with_name("hopper_compile_cake_prefill.py")
GPUS = [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)]
SHARED_BYTES_OF_AN_SM = 227 << 10  # of compute capability 9.0, by NVIDIA's programming guide
RESERVED_BYTES = 1 << 10  # for each thread block
REGISTERS_OF_AN_SM = 1 << 16


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return compile_by(Path(__file__).with_name("hopper_compile_cake.py"), tmp_path_factory.mktemp("triton"))


def test_every_variant_compiles_into_its_kernels(reports: list[dict[str, Any]]) -> None:
    for variant in DECODE_VARIANTS:
        names = {report["kernel"] for report in reports if report["variant"] == variant.name}
        split = (
            {"_fill_schedule", "split_decode"}
            if variant.max_keys
            else {"_fill_schedule", "split_decode", "merge_decode"}
        )
        assert names == ({"_plain_decode"} if variant.launch is None else split)


def test_keys_and_values_are_copied_sixteen_bytes_at_a_time_ahead_of_their_use(reports: list[dict[str, Any]]) -> None:
    """In hexadecimal; other copies are entries of the page table, or rows of 8 bits that a thread gets less of."""
    for report in reports:
        if report["kernel"] != "split_decode":
            continue
        assert report["products"], "on tensor cores"
        assert report["copies"].count("10") >= 8, report
        assert not report["roundings"], "8 bits become 16 at once"


def test_elements_of_few_bits_are_read_and_scaled_in_pairs_at_least(reports: list[dict[str, Any]]) -> None:
    """Byte by byte values of 8 bits take longer than those of 16. What nvfp4 reads so are the scales of its blocks.

    Its elements are subnormal before their scale is applied, which must not make zeros of them.
    """
    for report in reports:
        if report["kernel"] != "split_decode":
            continue
        is_packed = report["variant"].startswith("decode-4")
        assert report["byte_loads"] <= (16 if is_packed else 0), report
        assert set(report["scalings"]) == ({"mul.f16x2"} if is_packed else set()), report


def test_packed_keys_and_values_become_factors_where_they_are_read(reports: list[dict[str, Any]]) -> None:
    """By a conversion for every two, and without a trip through shared memory, from which values come transposed."""
    variants = {"decode-8-d64", "decode-8-d128", "decode-4-d64", "decode-4-d128"}
    found = [report for report in reports if report["kernel"] == "split_decode" and report["variant"] in variants]
    assert {report["variant"] for report in found} == variants
    launches = {variant.name: variant.launch for variant in DECODE_VARIANTS}
    for report in found:
        launch, head_dim = launches[report["variant"]], int(report["variant"].rpartition("d")[2])
        assert launch is not None
        assert report["conversions"] >= launch.block_len * head_dim // (32 * launch.num_warps), report
        assert report["rearrangements"] == 0, report


def test_all_fits_in_registers_and_in_the_shared_memory_that_the_launch_admits(reports: list[dict[str, Any]]) -> None:
    rows = {variant.name: variant for variant in DECODE_VARIANTS}
    for report in reports:
        row = rows[report["variant"]]
        assert report["spilled_bytes"] == 0, report
        if row.launch is not None and report["kernel"] == "split_decode":
            bound = row.launch.shared_bytes(row.head_dims[-1], report["group"], element_bytes(row.dtypes[-1][1]))
            assert report["shared_bytes"] <= bound < 1.1 * report["shared_bytes"], report


@pytest.mark.full
@pytest.mark.parametrize("capability", GPUS)
def test_no_row_that_is_admitted_on_a_gpu_takes_more_than_it_has(capability: tuple[int, int], tmp_path: Path) -> None:
    """At both ends of its groups."""
    reports = compile_by(Path(__file__).with_name("hopper_compile_cake.py"), tmp_path, *map(str, capability))
    assert len({report["variant"] for report in reports}) >= 6
    check_bounds(reports, capability)
    for report in reports:
        if report["kernel"] == "split_decode":
            taken = report["programs"] * (report["shared_bytes"] + RESERVED_BYTES)
            assert taken <= SHARED_BYTES[capability] + RESERVED_BYTES, report
            registers = report["programs"] * 32 * report["num_warps"] * -(-report["registers"] // 8) * 8
            assert capability != (9, 0) or registers <= REGISTERS_OF_AN_SM, report


def check_bounds(reports: list[dict[str, Any]], capability: tuple[int, int]) -> None:
    for report in reports:
        assert report["shared_bytes"] <= report["bound"] <= SHARED_BYTES[capability], report


def check_chunks(capability: tuple[int, int], cache: Path, names: list[str]) -> None:
    reports = compile_by(CHUNKS_SCRIPT, cache, ".".join(map(str, capability)), *names)
    assert {report["kernel"] for report in reports} >= {"paged_prefill"}
    check_bounds(reports, capability)


def test_a_row_for_chunks_takes_no_more_than_admitted_on_a_gpu_that_keeps_more_of_it_in_shared_memory(
    tmp_path: Path,
) -> None:
    check_chunks((10, 0), tmp_path, ["prefill-4-d64"])


@pytest.mark.full
@pytest.mark.parametrize("end", ["", "+"])
@pytest.mark.parametrize("capability", [gpu for gpu in GPUS if gpu != (9, 0)])
def test_no_row_for_chunks_that_is_admitted_on_a_gpu_takes_more_than_it_has(
    capability: tuple[int, int], end: str, tmp_path: Path
) -> None:
    """Those of Hopper stand in test_cake_prefill_compilation.py."""
    check_chunks(capability, tmp_path, [f"{row.name}{end}" for row in (*PREFILL_VARIANTS, *SEVERAL_VARIANTS)])


def test_as_many_programs_run_at_once_as_are_launched(reports: list[dict[str, Any]]) -> None:
    launches = {variant.name: variant.launch for variant in DECODE_VARIANTS}
    for report in reports:
        if (launch := launches[report["variant"]]) is not None:
            taken = launch.programs_per_sm * (report["shared_bytes"] + RESERVED_BYTES)
            assert taken <= SHARED_BYTES_OF_AN_SM, report


def test_another_step_compiles_nothing(reports: list[dict[str, Any]]) -> None:
    """The first step of a form does: 16 sequences; then 1, 5, 200 and 300, with tables of other widths and alignments.

    Of the merge, so does the first step of more pairs than programs.
    """
    counts: dict[tuple[str, str], list[bool]] = {}
    for report in reports:
        counts.setdefault((report["variant"], report["kernel"]), []).append(report["is_new"])
    for (_, kernel), news in counts.items():
        for first in range(0, len(news), 5):
            steps = news[first : first + 5]
            assert len(steps) == 5
            assert not any([*steps[1:3], *steps[4 if kernel == "merge_decode" else 3 :]])

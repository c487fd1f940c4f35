"""Sizes of the pool, and the start-up check of what a kernel can address."""

import dataclasses

import pytest
import torch
from doubles_attention import make_problem, torch_backend

from aserve.attention.base import KVOrder, KVScales
from aserve.attention.torch_backend import TorchBackend
from aserve.errors import ConfigError
from aserve.kernels.choose import choose_operators
from aserve.kernels.nvfp4 import NVFP4
from aserve.kernels.operators import KVTarget, Operators
from aserve.runner.kv_pool import GIB, KVLayout, allocate_pool, check_offsets, count_pages, gpu_memory_gib

CPU = torch.device("cpu")
DEMO = KVLayout(num_layers=30, num_kv_heads=3, head_dim=64, dtype=torch.bfloat16, device=CPU)


class NarrowBackend(TorchBackend):
    name = "narrow"
    offset_bits = 32


def test_bytes_of_the_demo_model() -> None:
    assert DEMO.page_bytes(1) == 23040  # of one token, as measured in bfloat16


def test_pages_in_a_gib() -> None:
    pages = count_pages(DEMO, 16, 1.0)
    assert (pages + 1) * 16 * 23040 <= 2**30 < (pages + 2) * 16 * 23040


def test_memory_for_no_page_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"kv_memory_gib 0.0001 holds no page: one takes 368640 bytes"):
        count_pages(DEMO, 16, 0.0001)


def test_pages_get_what_the_gpu_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 100 GiB a tenth stays unused, 20 hold weights, 6 are for steps and graphs."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (80 * GIB, 100 * GIB))
    assert gpu_memory_gib(torch.device("cuda"), 0.9, 6 * GIB, 1 << 20) == pytest.approx(64)


@pytest.mark.parametrize(("free_gib", "page_bytes"), [(11, 1), (13, GIB)], ids=["nothing", "a page, for padding"])
def test_a_gpu_with_too_little_left_for_pages_is_refused_in_gib(
    free_gib: int, page_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free_gib * GIB, 80 * GIB))
    message = (
        r"no GPU memory is left for KV pages: 1[13]\.00 of 80\.00 GiB are free, steps and graphs need 4\.00 GiB, and "
        r"kv_memory_fraction 0\.9 keeps 8\.00 GiB unused; lower max_num_seqs"
    )
    with pytest.raises(ConfigError, match=message):
        gpu_memory_gib(torch.device("cuda"), 0.9, 4 * GIB, page_bytes)


def test_the_pool_has_a_dummy_page_beyond_the_numbered_ones() -> None:
    layout = KVLayout(num_layers=2, num_kv_heads=3, head_dim=8, dtype=torch.float32, device=CPU)
    pool = allocate_pool(layout, 4, 5)
    assert len(pool) == 2
    assert all(pages.shape == (6, 4, 3, 8) for layer in pool for pages in (layer.key, layer.value))
    assert len({pages.data_ptr() for layer in pool for pages in (layer.key, layer.value)}) == 4
    assert all(not pages.any() for layer in pool for pages in (layer.key, layer.value))


def test_a_pool_with_heads_first_is_indexed_like_any_other() -> None:
    """And the torch operators write to it: token ``slot`` goes to page slot // 4, place slot % 4."""
    layout = KVLayout(num_layers=1, num_kv_heads=3, head_dim=8, dtype=torch.float32, device=CPU, order="HND")
    (layer,) = allocate_pool(layout, 4, 5)
    assert layer.key.shape == (6, 4, 3, 8)
    assert layer.key.transpose(1, 2).is_contiguous()
    assert layer.value.transpose(1, 2).is_contiguous()
    k, v = torch.randn(2, 2, 3, 8)
    for operators in (Operators(), choose_operators(CPU)):
        layer.key.zero_()
        operators.store_kv(k, v, KVTarget(layer.key, layer.value, torch.tensor([9, 3])))
        assert torch.equal(layer.key[2, 1], k[0])
        assert torch.equal(layer.value[0, 3], v[1])
        assert layer.key.count_nonzero() == k.numel()


@pytest.mark.parametrize("order", ["NHD", "HND"])
def test_pages_of_nvfp4_take_nine_sixteenths_of_a_byte_an_element(order: KVOrder) -> None:
    layout = dataclasses.replace(DEMO, dtype=NVFP4, order=order)
    assert layout.page_bytes(1) == 2 * 30 * 3 * (32 + 4) == 6480  # of one token: half of 64 bytes, and 4 scales
    assert DEMO.page_bytes(16) / layout.page_bytes(16) == pytest.approx(3.56, abs=0.005)
    scales = tuple(KVScales(0.5 + i, 0.25) for i in range(30))
    pool = allocate_pool(dataclasses.replace(layout, scales=scales), 16, 2)
    assert [(layer.key_scale, layer.value_scale) for layer in pool] == [(0.5 + i, 0.25) for i in range(30)]
    parts = [
        part
        for layer in pool
        if layer.block_scales is not None
        for part in (layer.key, layer.value, layer.block_scales.key, layer.block_scales.value)
    ]
    assert {part.shape for part in parts} == {(3, 16, 3, 32), (3, 16, 3, 4)}
    assert sum(part.numel() * part.itemsize for part in parts) == 3 * layout.page_bytes(16)
    assert all(part.transpose(1, 2).is_contiguous() == (order == "HND") for part in parts)
    check_offsets(layout, 16, 2 * 699_050, NarrowBackend(make_problem(), CPU))


def test_a_139_gib_card_full_of_the_demo_is_half_of_what_32_bits_reach() -> None:
    """5.83 million tokens; the largest offset of one layer's keys is 0.52 of 2^31."""
    num_pages = 5_830_000 // 16
    check_offsets(DEMO, 16, num_pages, NarrowBackend(make_problem(), CPU))
    assert num_pages * DEMO.page_elements(16) / 2**31 == pytest.approx(0.52, abs=0.005)


def test_the_limit_of_32_bit_offsets_is_exact() -> None:
    """A page has 16 * 3 * 64 = 3072 elements: 699050 pages end below 2^31, of which one is the dummy page."""
    check_offsets(DEMO, 16, 699_049, NarrowBackend(make_problem(), CPU))
    with pytest.raises(ConfigError, match=r"'narrow' has 32-bit offsets .* the most is num_pages=699049"):
        check_offsets(DEMO, 16, 699_050, NarrowBackend(make_problem(), CPU))
    check_offsets(DEMO, 16, 699_050, torch_backend())


def test_page_numbers_fit_the_page_table() -> None:
    with pytest.raises(ConfigError, match="does not fit the page table's 32-bit numbers"):
        check_offsets(DEMO, 1, 2**31 - 1, torch_backend())

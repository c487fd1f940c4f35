"""The tensors behind the page numbers: keys and values of every layer, and how many pages there are."""

from dataclasses import dataclass

import torch

from aserve.attention.base import AttentionBackend, KVOrder, KVScales, LayerKV
from aserve.errors import ConfigError
from aserve.kernels.nvfp4 import BLOCK, NVFP4, BlockScales

NUM_DUMMY_PAGES = 1  # at the end of the pool; the dummy row points at them, the scheduler does not know them
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Shape of what one token leaves behind."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    order: KVOrder = "NHD"
    scales: tuple[KVScales, ...] = ()  # of each layer; none: 1 for all
    num_ranks: int = 1  # that share the tokens of each page

    def page_bytes(self, page_size: int) -> int:
        """Bytes that a rank keeps of one page: keys and values of all layers, scales of blocks included."""
        num_elements = self.page_elements(page_size)
        num_bytes = num_elements * self.dtype.itemsize
        if self.dtype == NVFP4:
            num_bytes += num_elements * 2 // BLOCK
        return 2 * self.num_layers * num_bytes

    def page_elements(self, page_size: int) -> int:
        """Elements that a rank keeps of one page in one layer's keys (or values); pairs of nvfp4's."""
        return page_size // self.num_ranks * self.num_kv_heads * self.head_width

    @property
    def head_width(self) -> int:
        """Elements of a head in a page, pairs of nvfp4's."""
        return self.head_dim // 2 if self.dtype == NVFP4 else self.head_dim


def count_pages(layout: KVLayout, page_size: int, memory_gib: float) -> int:
    """Return how many pages fit into ``memory_gib``, the dummy pages taken off. Raises ConfigError if none does."""
    num_pages = int(memory_gib * GIB) // layout.page_bytes(page_size) - NUM_DUMMY_PAGES
    if num_pages < 1:
        raise ConfigError(
            f"kv_memory_gib {memory_gib:g} holds no page: one takes {layout.page_bytes(page_size)} bytes, "
            f"and {NUM_DUMMY_PAGES} more are needed for padding"
        )
    return num_pages


def check_offsets(layout: KVLayout, page_size: int, num_pages: int, backend: AttentionBackend) -> None:
    """Raise ConfigError if the pool has an element that ``backend`` cannot address, or page numbers overflow int32."""
    total_pages = num_pages + NUM_DUMMY_PAGES
    last_offset = total_pages * layout.page_elements(page_size) - 1
    limit = (1 << (backend.offset_bits - 1)) - 1
    if last_offset > limit:
        most = (limit + 1) // layout.page_elements(page_size) - NUM_DUMMY_PAGES
        raise ConfigError(
            f"attention backend {backend.name!r} has {backend.offset_bits}-bit offsets and cannot address "
            f"{num_pages} pages of {page_size} tokens; the most is num_pages={most}"
        )
    if total_pages > 2**31 - 1:
        raise ConfigError(f"num_pages {num_pages} does not fit the page table's 32-bit numbers")


def gpu_memory_gib(device: torch.device, fraction: float, reserved_bytes: int, page_bytes: int) -> float:
    """Return what is left for KV pages of ``fraction`` of the GPU's memory, in GiB.

    Weights are loaded already; ``reserved_bytes`` are what steps and graphs will take. Raises ConfigError naming needed
    and free memory if not even one page of ``page_bytes`` is left, beside those for padding.
    """
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    left = free_bytes - (1 - fraction) * total_bytes - reserved_bytes
    if left < (1 + NUM_DUMMY_PAGES) * page_bytes:
        raise ConfigError(
            f"no GPU memory is left for KV pages: {free_bytes / GIB:.2f} of {total_bytes / GIB:.2f} GiB are free, "
            f"steps and graphs need {reserved_bytes / GIB:.2f} GiB, and kv_memory_fraction {fraction:g} keeps "
            f"{(1 - fraction) * total_bytes / GIB:.2f} GiB unused; lower max_num_seqs or max_num_batched_tokens, or "
            "raise kv_memory_fraction"
        )
    return left / GIB


def allocate_pool(layout: KVLayout, page_size: int, num_pages: int) -> list[LayerKV]:
    """Return a rank's part of zeroed pages for every layer in the layout's order, the dummy pages included."""
    is_transposed = layout.order == "HND"
    own_size = page_size // layout.num_ranks
    tokens_and_heads = (layout.num_kv_heads, own_size) if is_transposed else (own_size, layout.num_kv_heads)
    shape = (num_pages + NUM_DUMMY_PAGES, *tokens_and_heads)

    def zeros(width: int, dtype: torch.dtype) -> torch.Tensor:
        pages = torch.zeros(*shape, width, dtype=dtype, device=layout.device)
        return pages.transpose(1, 2) if is_transposed else pages

    def allocate(scales: KVScales) -> LayerKV:
        if layout.dtype != NVFP4:
            key, value = (zeros(layout.head_dim, layout.dtype) for _ in range(2))
            return LayerKV(key, value, scales.key, scales.value, key_transform=scales.key_transform)
        key, value = (zeros(layout.head_width, torch.uint8) for _ in range(2))
        blocks = BlockScales(*(zeros(layout.head_dim // BLOCK, torch.float8_e4m3fn) for _ in range(2)))
        return LayerKV(key, value, scales.key, scales.value, blocks, scales.key_transform)

    return [allocate(scales) for scales in layout.scales or (KVScales(),) * layout.num_layers]

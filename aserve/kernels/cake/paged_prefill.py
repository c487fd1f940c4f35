"""How the prefill kernel is launched."""

from dataclasses import dataclass

from aserve.kernels.cake.attention_call import AttentionCall
from aserve.kernels.cake.factors import factor_dtype
from aserve.kernels.cake.prefill_kernel import paged_prefill
from aserve.kernels.cake.prefill_tiles import PrefillTiles
from aserve.kernels.cake.variant import Launch

MIN_WIDTH = 16  # elements of a head that a matrix product has at least


@dataclass(frozen=True, slots=True)
class PrefillLaunch(Launch):
    """How a variant is compiled and launched."""

    tile_rows: int  # queries times heads of a group
    block_len: int  # keys
    num_warps: int
    num_stages: int

    def shared_bytes(self, head_dim: int, group: int, kv_bytes: int) -> int:
        """Return the shared memory that a program takes at most, with queries in 16 bits."""
        queries, block = 2 * self.tile_rows * row_width(head_dim), self.block_len * row_width(head_dim)
        if kv_bytes == 2:
            return queries + self.num_stages * 2 * kv_bytes * block
        return queries + max(self.num_stages - 1, 1) * 2 * kv_bytes * block + 2 * block  # as factors, once converted


PLAIN_LAUNCH = PrefillLaunch(tile_rows=16, block_len=16, num_warps=4, num_stages=1)


def run_prefill(call: AttentionCall, launch: PrefillLaunch, tiles: PrefillTiles) -> None:
    """Enqueue the kernel; ``tiles`` is filled for the call's chunks and group and for the launch's rows."""
    rules, pages, batch = call.rules, call.pages, call.batch
    if batch.cu_query_lens is None:
        raise ValueError("cu_query_lens: must tell where each chunk starts")
    if tiles.tile_rows != launch.tile_rows:
        raise ValueError(f"tiles: must be of {launch.tile_rows} rows, not {tiles.tile_rows}")
    if rules.scale <= 0:
        raise ValueError(f"scale: must be positive, not {rules.scale}")
    paged_prefill[(len(tiles.chunks), call.num_kv_heads)](
        call.q,
        call.out,
        call.out if call.lse is None else call.lse,
        pages.keys,
        pages.values,
        batch.page_table,
        batch.rows,
        batch.key_lens,
        batch.cu_query_lens,
        tiles.chunks,
        tiles.first_rows,
        call.out if rules.sinks is None else rules.sinks,
        batch.page_table.stride(0),
        rules.window or 0,
        rules.scale,
        rules.softcap or 1.0,
        pages.key_scale,
        pages.value_scale,
        **call.constants,
        HAS_WINDOW=rules.window is not None,
        WIDTH=row_width(call.q.shape[2]),
        TILE_ROWS=launch.tile_rows,
        BLOCK_LEN=launch.block_len,
        FACTOR=factor_dtype(call.q.dtype, pages.keys.dtype),
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
    )


def row_width(head_dim: int) -> int:
    """Return the elements that the kernel gives to a head."""
    return max(MIN_WIDTH, 1 << (head_dim - 1).bit_length())

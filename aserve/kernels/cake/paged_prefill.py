"""How the prefill kernel is launched."""

from aserve.kernels.cake.attention_call import AttentionCall
from aserve.kernels.cake.factors import factor_dtype
from aserve.kernels.cake.prefill_kernel import paged_prefill
from aserve.kernels.cake.prefill_launch import PrefillLaunch
from aserve.kernels.cake.prefill_tiles import PrefillTiles
from aserve.kernels.cake.variant import check_block_len, row_width


def run_prefill(call: AttentionCall, launch: PrefillLaunch, tiles: PrefillTiles) -> None:
    """Enqueue the kernel; ``tiles`` is filled for the call's chunks and group and for the launch's rows."""
    rules, pages, batch = call.rules, call.pages, call.batch
    if batch.cu_query_lens is None:
        raise ValueError("cu_query_lens: must tell where each chunk starts")
    if tiles.tile_rows != launch.tile_rows:
        raise ValueError(f"tiles: must be of {launch.tile_rows} rows, not {tiles.tile_rows}")
    if rules.scale <= 0:
        raise ValueError(f"scale: must be positive, not {rules.scale}")
    check_block_len(launch.block_len, call.q.dtype, 4 / pages.per_word)
    paged_prefill[(len(tiles.chunks), call.num_kv_heads)](
        call.q,
        call.out,
        call.out if call.lse is None else call.lse,
        *pages.pointers,
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

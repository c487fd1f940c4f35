"""Which experts each token takes, and where its rows stand when they are sorted by expert: nothing is read on the host.

A pair is a token and one of its experts, numbered token * k + rank. The sorted order is by expert, then by token. Rows
of an expert are cut into blocks, for which there is a table; a table has room for the most blocks that there can be.
Tokens are cut into chunks, one a program. A chunk's pairs have known places once all chunks have counted theirs, so
there are two kernels, or one where there is one chunk.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

LOWEST = tl.constexpr(-3.0e38)  # takes the place of NaN, so that every token has experts


@triton.jit(do_not_specialize=["num_tokens", "num_blocks", "block_rows"])
def choose_experts(
    scores,
    expert_ids,
    weights,
    ranks,
    counts,
    order,
    blocks,
    num_tokens,
    num_blocks,
    block_rows,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS_PER_TOKEN: tl.constexpr,
    IS_RENORMALISED: tl.constexpr,
    IS_ALONE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
    BLOCK_RANKS: tl.constexpr,
    BLOCK_TABLE: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Write weights [T, k]; for ``place_pairs``: expert_ids and ranks within the chunk [T, k], counts [chunks, E].

    scores [T, E]. IS_ALONE: there is one chunk, so write the order and the table of blocks instead.
    """
    chunk = tl.program_id(0)
    tokens = chunk * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    columns = tl.arange(0, BLOCK_EXPERTS)
    rank_columns = tl.arange(0, BLOCK_RANKS)[None, :]
    is_token, is_expert = (tokens < num_tokens)[:, None], (columns < NUM_EXPERTS)[None, :]
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    places = tokens[:, None].to(tl.int64) * NUM_EXPERTS + columns[None, :]
    values = tl.load(scores + places, mask=is_token & is_expert, other=0.0).to(tl.float32)
    left = tl.where(is_expert, tl.where(values > LOWEST, values, LOWEST), float("-inf"))
    highest = tl.max(left, axis=1)
    total = tl.sum(tl.exp(left - highest[:, None]), axis=1)

    ids = tl.zeros([BLOCK_TOKENS, BLOCK_RANKS], tl.int32)
    shares = tl.zeros([BLOCK_TOKENS, BLOCK_RANKS], tl.float32)
    taken = tl.zeros([BLOCK_TOKENS, BLOCK_EXPERTS], tl.int32)
    for rank in tl.static_range(EXPERTS_PER_TOKEN):
        best = tl.max(left, axis=1)
        expert = tl.min(tl.where(left == best[:, None], columns[None, :], BLOCK_EXPERTS), axis=1)
        is_it = columns[None, :] == expert[:, None]
        ids = tl.where(rank_columns == rank, expert[:, None], ids)
        shares = tl.where(rank_columns == rank, tl.exp(best - highest)[:, None], shares)
        taken += (is_it & is_token).to(tl.int32)
        left = tl.where(is_it, float("-inf"), left)
    if IS_RENORMALISED:
        total = tl.sum(shares, axis=1)
    pairs = tokens[:, None] * EXPERTS_PER_TOKEN + rank_columns
    is_pair = is_token & (rank_columns < EXPERTS_PER_TOKEN)
    tl.store(weights + pairs, shares / total[:, None], mask=is_pair)

    earlier = tl.cumsum(taken, axis=0) - taken  # tokens of this chunk that take the expert, too
    own = tl.sum(taken, axis=0)
    if IS_ALONE:
        firsts = tl.cumsum(own, axis=0) - own
        positions = _take(earlier + firsts[None, :], ids, EXPERTS_PER_TOKEN, BLOCK_EXPERTS, BLOCK_RANKS)
        tl.store(order + positions, pairs, mask=is_pair)
        for number in range(0, num_blocks, BLOCK_TABLE):
            _write_blocks(
                blocks, own, number, num_blocks, num_blocks, block_rows, NUM_EXPERTS, BLOCK_EXPERTS, BLOCK_TABLE
            )
    else:
        tl.store(expert_ids + pairs, ids, mask=is_pair)
        tl.store(ranks + pairs, _take(earlier, ids, EXPERTS_PER_TOKEN, BLOCK_EXPERTS, BLOCK_RANKS), mask=is_pair)
        tl.store(counts + chunk * NUM_EXPERTS + columns, own, mask=columns < NUM_EXPERTS)


@triton.jit(do_not_specialize=["num_tokens", "num_chunks", "num_blocks", "block_rows"])
def place_pairs(
    expert_ids,
    ranks,
    counts,
    order,
    blocks,
    num_tokens,
    num_chunks,
    num_blocks,
    block_rows,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS_PER_TOKEN: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
    BLOCK_RANKS: tl.constexpr,
    BLOCK_TABLE: tl.constexpr,
    BLOCK_CHUNKS: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Write a chunk's part of order [T * k], the pairs, and an equal share of the blocks' table [3, blocks]."""
    chunk = tl.program_id(0)
    tokens = chunk * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    columns = tl.arange(0, BLOCK_EXPERTS)
    rank_columns = tl.arange(0, BLOCK_RANKS)[None, :]
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    totals = tl.zeros([BLOCK_EXPERTS], tl.int32)
    earlier = tl.zeros([BLOCK_EXPERTS], tl.int32)
    for first in range(0, num_chunks, BLOCK_CHUNKS):
        others = (first + tl.arange(0, BLOCK_CHUNKS))[:, None]
        inside = (others < num_chunks) & (columns < NUM_EXPERTS)[None, :]
        found = tl.load(counts + others * NUM_EXPERTS + columns[None, :], mask=inside, other=0)
        totals += tl.sum(found, axis=0)
        earlier += tl.sum(tl.where(others < chunk, found, 0), axis=0)

    pairs = tokens[:, None] * EXPERTS_PER_TOKEN + rank_columns
    is_pair = (tokens < num_tokens)[:, None] & (rank_columns < EXPERTS_PER_TOKEN)
    ids = tl.load(expert_ids + pairs, mask=is_pair, other=0)
    firsts = (tl.cumsum(totals, axis=0) - totals + earlier)[None, :]
    positions = _take(firsts, ids, EXPERTS_PER_TOKEN, BLOCK_EXPERTS, BLOCK_RANKS)
    tl.store(order + positions + tl.load(ranks + pairs, mask=is_pair, other=0), pairs, mask=is_pair)

    share = tl.cdiv(num_blocks, num_chunks)
    end = tl.minimum((chunk + 1) * share, num_blocks)
    for number in range(chunk * share, end, BLOCK_TABLE):
        _write_blocks(blocks, totals, number, end, num_blocks, block_rows, NUM_EXPERTS, BLOCK_EXPERTS, BLOCK_TABLE)


@triton.jit
def _take(values, ids, EXPERTS_PER_TOKEN: tl.constexpr, BLOCK_EXPERTS: tl.constexpr, BLOCK_RANKS: tl.constexpr):
    """Return values[t, ids[t, rank]]; values [T, E] or [1, E], ids [T, k]."""
    columns, rank_columns = tl.arange(0, BLOCK_EXPERTS)[None, :], tl.arange(0, BLOCK_RANKS)[None, :]
    result = tl.zeros_like(ids)
    for rank in tl.static_range(EXPERTS_PER_TOKEN):
        expert = tl.sum(tl.where(rank_columns == rank, ids, 0), axis=1)[:, None]
        taken = tl.sum(tl.where(columns == expert, values, 0), axis=1)[:, None]
        result = tl.where(rank_columns == rank, taken, result)
    return result


@triton.jit
def _write_blocks(
    blocks,
    totals,
    number,
    end,
    num_blocks,
    block_rows,
    NUM_EXPERTS: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
    BLOCK_TABLE: tl.constexpr,
) -> None:
    """Write expert, first row and end of rows of the blocks from ``number`` on; ``totals`` [E] are rows of each expert.

    A block that is not needed has the expert NUM_EXPERTS.
    """
    columns = tl.arange(0, BLOCK_EXPERTS)[None, :]
    numbers = number + tl.arange(0, BLOCK_TABLE)
    needed = (totals + block_rows - 1) // block_rows
    block_ends, row_ends = tl.cumsum(needed, axis=0), tl.cumsum(totals, axis=0)
    is_before = (block_ends[None, :] <= numbers[:, None]) & (columns < NUM_EXPERTS)
    experts = tl.sum(is_before.to(tl.int32), axis=1)
    is_it = columns == experts[:, None]
    skipped = (numbers[:, None] - (block_ends - needed)[None, :]) * block_rows
    firsts = tl.sum(tl.where(is_it, (row_ends - totals)[None, :] + skipped, 0), axis=1)
    ends = tl.sum(tl.where(is_it, row_ends[None, :], 0), axis=1)
    inside = numbers < end
    tl.store(blocks + numbers, experts, mask=inside)
    tl.store(blocks + num_blocks + numbers, firsts, mask=inside)
    tl.store(blocks + 2 * num_blocks + numbers, ends, mask=inside)

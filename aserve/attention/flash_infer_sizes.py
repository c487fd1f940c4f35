"""How much workspace FlashInfer's plans divide up at most; follows what its scheduler allocates."""

from aserve.attention.base import AttentionKind

MAX_DECODE_BLOCKS_PER_SM = 16  # of the kernel without tensor cores: 128 threads or more a block
BLOCKS_PER_SM = 2  # that the tensor-core kernel's scheduler counts with
MAX_QUERY_TILE = 128
SLACK_BYTES = 256  # for alignment


def max_split_blocks(kind: AttentionKind, num_sms: int) -> int:
    """Return how many thread blocks for a KV head the scheduler splits keys into at most."""
    return BLOCKS_PER_SM * num_sms // kind.num_kv_heads


def query_tile(kind: AttentionKind, max_query_len: int) -> int:
    """Return the rows of a tile: queries times heads per KV head."""
    packed_len = max_query_len * (kind.num_heads // kind.num_kv_heads)
    if packed_len > 64 and kind.head_dim < 256:
        return MAX_QUERY_TILE
    return 64 if packed_len > 16 else 16


def captured_blocks(kind: AttentionKind, num_seqs: int, num_rows: int, tile: int, num_sms: int) -> int:
    """Return the thread blocks for a KV head of a captured grid of ``num_seqs`` sequences, the empty one included."""
    packed_rows = num_rows * (kind.num_heads // kind.num_kv_heads)
    return max(max_split_blocks(kind, num_sms), -(-packed_rows // tile) + num_seqs - 1)


def partials_bytes(kind: AttentionKind, num_blocks: int, tile: int) -> int:
    """Return the bytes of partial outputs and log-sum-exps of ``num_blocks`` tiles."""
    return 4 * kind.num_heads * num_blocks * tile * (kind.head_dim + 1) + SLACK_BYTES


def decode_float_bytes(kind: AttentionKind, max_num_seqs: int, num_sms: int) -> int:
    """Return what decodes of ``max_num_seqs`` sequences need for partial results, with or without tensor cores."""
    tile = query_tile(kind, 1)
    tensor_cores = partials_bytes(kind, captured_blocks(kind, max_num_seqs + 1, max_num_seqs + 1, tile, num_sms), tile)
    cuda_core_blocks = MAX_DECODE_BLOCKS_PER_SM * num_sms // kind.num_kv_heads
    return max(tensor_cores, partials_bytes(kind, cuda_core_blocks, 1))


def chunk_float_bytes(kind: AttentionKind, num_sms: int) -> int:
    """Return what chunks need for partial results when they run outside of a graph."""
    tile = query_tile(kind, MAX_QUERY_TILE)
    return partials_bytes(kind, max_split_blocks(kind, num_sms), tile)


def integer_bytes(kind: AttentionKind, max_num_seqs: int, max_num_rows: int, num_sms: int) -> int:
    """Return what any plan for ``max_num_seqs`` sequences with ``max_num_rows`` queries writes at most."""
    num_seqs, num_rows = max_num_seqs + 1, max_num_rows + max_num_seqs
    num_blocks = captured_blocks(kind, num_seqs, num_rows, 16, num_sms)
    num_blocks = max(num_blocks, MAX_DECODE_BLOCKS_PER_SM * num_sms // kind.num_kv_heads)
    return 13 * num_blocks + 4 * (max(num_seqs, num_blocks) + 1) + 4 * (num_rows + 1) + SLACK_BYTES

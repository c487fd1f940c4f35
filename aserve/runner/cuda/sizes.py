"""Which sizes are captured: decode batches, mixed steps by token count, and heads by sampled rows."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence

from aserve.attention.base import CaptureShape
from aserve.scheduler.plan import StepPlan

MAX_CHUNKS = 128  # prefill chunks of one step
MAX_DECODES = 512


def decode_sizes(max_num_seqs: int) -> list[int]:
    """Return the batch sizes of decode graphs, ascending, ending with ``max_num_seqs`` or MAX_DECODES.

    Padding costs a row's share of the matrix products, so sizes lie closer where steps are short.
    """
    largest = min(max_num_seqs, MAX_DECODES)
    return sorted({*(size for size in (1, 2, 4, *range(8, largest, 8)) if size < largest), largest})


def warm_up_sizes(max_num_tokens: int) -> list[int]:
    """Return token counts, ascending, that use every kernel and launch which a step may need.

    Above MAX_DECODES only launches of experts still depend on the count, and none is for less than twice as many
    tokens as it begins with.
    """
    doubled = (MAX_DECODES << i for i in range(1, max_num_tokens.bit_length()))
    return [*decode_sizes(MAX_DECODES), *(size for size in doubled if size <= max_num_tokens)]


def token_sizes(max_num_tokens: int) -> list[int]:
    """Return the token counts of mixed graphs, ascending, ending with ``max_num_tokens``: an eighth apart or closer."""
    return sorted({*(size for size in _grown() if size < max_num_tokens), max_num_tokens})


def _grown() -> Iterator[int]:
    size, step = 16, 16
    while size < 1 << 20:
        yield size
        if size >= 16 * step:
            step *= 2
        size += step


def decode_shape(size: int) -> CaptureShape:
    """Return the shape of a graph of ``size`` decodes."""
    return CaptureShape(num_tokens=size, num_decodes=size, num_chunks=0)


def mixed_shape(size: int, max_num_seqs: int) -> CaptureShape:
    """Return the shape of a graph of ``size`` tokens: as many decodes and chunks as these and the limits allow."""
    return CaptureShape(size, num_decodes=min(size, max_num_seqs), num_chunks=min(size, MAX_CHUNKS))


def fitting(sizes: Sequence[int], count: int) -> int | None:
    """Return the smallest of the ascending ``sizes`` that holds ``count``, None if none does."""
    place = bisect_left(sizes, count)
    return sizes[place] if place < len(sizes) else None


def exact_shape(plan: StepPlan) -> CaptureShape:
    """Return the shape of ``plan`` without padding."""
    return CaptureShape(plan.num_tokens, plan.num_decodes, len(plan.rows) - plan.num_decodes)

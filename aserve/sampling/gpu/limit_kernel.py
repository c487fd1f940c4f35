"""Triton kernel that finds the smallest logit which top-k, top-p and min-p leave, without sorting the vocabulary.

One program a row. Both filters ask for the largest logit x such that what stands at x or above it, counted for top-k
and weighed for top-p, reaches a target. Bounds known beforehand usually leave few candidates, which are copied to
a small buffer and searched in registers, one bit of the answer at a time. If they leave too many, passes over the
row count and weigh against eight pivots each and close in first.
"""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# mypy: disallow-untyped-calls=False

import triton
import triton.language as tl

from aserve.sampling.gpu.pick_kernels import exponent_scale, is_finite_row, load_row_sums

CAPACITY = 4096  # candidates that are searched in registers
TILE = 4096  # tokens copied at a time
NARROW_TILE = 1024  # tokens weighed at a time, against all pivots
NUM_PIVOTS = tl.constexpr(8)


@triton.jit
def to_key(values):
    """Map float32 to int64 in [0, 2^32) in the same order."""
    bits = values.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64) + 2147483648


@triton.jit
def from_key(keys):
    """Invert ``to_key``."""
    bits = (keys - 2147483648).to(tl.int32)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True)


@triton.jit
def largest_key(keys, measures, base, target):
    """Return the largest key for which ``base`` and the ``measures`` [C] float64 from it on reach ``target``, or 0."""
    found = tl.full((), 0, tl.int64)
    for bit in range(32):
        trial = found + (tl.full((), 1, tl.int64) << (31 - bit))
        reached = base + tl.sum(tl.where(keys >= trial, measures, 0.0), 0)
        found = tl.where(reached >= target, trial, found)
    return found


@triton.jit
def load_tile(logits, ids, VOCAB_SIZE: tl.constexpr):
    """Return the logits of ``ids`` as float32, minus infinity past the end."""
    return tl.load(logits + ids, ids < VOCAB_SIZE, other=float("-inf")).to(tl.float32)


@triton.jit
def collect(logits, candidates, low, high, VOCAB_SIZE: tl.constexpr, TILE: tl.constexpr, CAPACITY: tl.constexpr):
    """Copy the finite logits in [low, high), the first CAPACITY of them; return how many there are."""
    tl.debug_barrier()  # all have read what was there
    count = tl.full((), 0, tl.int32)
    for start in range(0, VOCAB_SIZE, TILE):
        values = load_tile(logits, start + tl.arange(0, TILE), VOCAB_SIZE)
        is_inside = (values >= low) & (values < high) & (values > float("-inf"))
        places = count + tl.cumsum(is_inside.to(tl.int32), 0) - 1
        tl.store(candidates + places, values, is_inside & (places < CAPACITY))
        count += tl.sum(is_inside.to(tl.int32), 0)
    tl.debug_barrier()  # what one thread wrote others will read
    return count


@triton.jit
def choose_pivots(low, high, num_passes):
    """Return [NUM_PIVOTS] logits between ``low`` and ``high``, the last one right below ``high``.

    They are spaced evenly by value and by bit pattern in turns, which ends for any logits; from an infinite ``low``
    they stand at growing distances.
    """
    order = tl.arange(0, NUM_PIVOTS) + 1
    low_key, top_key = to_key(low), to_key(high) - 1
    top = from_key(top_key)
    by_value = tl.where(order == NUM_PIVOTS, top, low + (top - low) * (order.to(tl.float32) / NUM_PIVOTS))
    by_key = from_key(low_key + (top_key - low_key) * order // NUM_PIVOTS)
    distance = tl.exp2((7 * num_passes + NUM_PIVOTS - 1 - order).to(tl.float32))
    outwards = tl.where(order == NUM_PIVOTS, top, top - distance)
    if low == float("-inf"):
        pivots = tl.where(num_passes < 3, outwards, by_key)
    else:
        pivots = tl.where(num_passes % 2 == 0, by_value, by_key)
    return pivots


@triton.jit
def measure_pivots(logits, pivots, best, scale, VOCAB_SIZE: tl.constexpr, TILE: tl.constexpr):
    """Return how many logits stand at or above each pivot, and their weight; [NUM_PIVOTS] float64 both."""
    counts = tl.zeros((NUM_PIVOTS, TILE), tl.int32)
    masses = tl.zeros((NUM_PIVOTS, TILE), tl.float64)
    for start in range(0, VOCAB_SIZE, TILE):
        values = load_tile(logits, start + tl.arange(0, TILE), VOCAB_SIZE)
        weights = tl.exp2((values - best) * scale).to(tl.float64)
        is_above = values[None, :] >= pivots[:, None]
        counts += is_above.to(tl.int32)
        masses += tl.where(is_above, weights[None, :], 0.0)
    return tl.sum(counts, 1).to(tl.float64), tl.sum(masses, 1)


@triton.jit
def search(
    logits,
    candidates,
    best,
    scale,
    low,
    target,
    WEIGHED: tl.constexpr,
    VOCAB_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    NARROW_TILE: tl.constexpr,
    CAPACITY: tl.constexpr,
):
    """Return the largest logit from which on count or weight reaches ``target`` (float64), ``low`` if none does.

    Also returns the count and the weight of what stands above it; these mean nothing if none does.
    """
    high = from_key(to_key(best) + 1)
    count_above = tl.full((), 0, tl.float64)  # at high and above
    mass_above = tl.full((), 0, tl.float64)
    num_inside = collect(logits, candidates, low, high, VOCAB_SIZE, TILE, CAPACITY).to(tl.float64)
    num_low = num_inside  # at low and above
    num_passes = tl.full((), 0, tl.int32)
    is_reached = WEIGHED | (num_inside >= target)
    while is_reached & (num_inside > CAPACITY) & (to_key(high) - to_key(low) > 1):
        pivots = choose_pivots(low, high, num_passes)
        counts, masses = measure_pivots(logits, pivots, best, scale, VOCAB_SIZE, NARROW_TILE)
        measures = masses if WEIGHED else counts
        is_inside = (pivots > low) & (pivots < high)
        is_low, is_high = is_inside & (measures >= target), is_inside & (measures < target)
        new_low = tl.max(tl.where(is_low, pivots, low), 0)
        new_high = tl.min(tl.where(is_high, pivots, high), 0)
        if new_low > low:
            num_low = tl.min(tl.where(is_low, counts, VOCAB_SIZE), 0)
        if new_high < high:
            count_above = tl.max(tl.where(is_high, counts, 0.0), 0)
            mass_above = tl.max(tl.where(is_high, masses, 0.0), 0)
        low, high = new_low, new_high
        num_inside = num_low - count_above
        num_passes += 1
    if num_passes > 0:
        collect(logits, candidates, low, high, VOCAB_SIZE, TILE, CAPACITY)
    if is_reached & (num_inside <= CAPACITY):  # else they are all equal, or too few
        places = tl.arange(0, CAPACITY)
        is_candidate = places < num_inside
        values = tl.load(candidates + places, is_candidate, other=float("-inf"))
        keys = to_key(values)
        weights = tl.where(is_candidate, tl.exp2((values - best) * scale), 0.0).to(tl.float64)
        ones = is_candidate.to(tl.float64)
        if WEIGHED:
            found = largest_key(keys, weights, mass_above, target)
        else:
            found = largest_key(keys, ones, count_above, target)
        if found > 0:
            low = from_key(found)
            count_above += tl.sum(tl.where(keys > found, ones, 0.0), 0)
            mass_above += tl.sum(tl.where(keys > found, weights, 0.0), 0)
    return low, count_above, mass_above


@triton.jit(
    do_not_specialize_on_alignment=[
        "temperatures", "top_ks", "top_ps", "min_ps", "maxima", "sums", "bests", "limits",
    ],
)  # fmt: skip
def find_limits(
    logits,  # [N, V], rows ROW_STRIDE apart
    temperatures,  # [N] float32, 0 is greedy
    top_ks,  # [N] float32, 0 is off
    top_ps,  # [N] float32, 1 is off
    min_ps,  # [N] float32, 0 is off
    maxima,  # [N, NUM_BLOCKS] float32
    sums,  # [N, NUM_BLOCKS] float32
    candidates,  # [N, CAPACITY] float32, written
    bests,  # [N] float32, written: the best logit
    limits,  # [N] float32, written: relative to the best and scaled; minus infinity leaves all, NaN nothing
    VOCAB_SIZE: tl.constexpr,
    ROW_STRIDE: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    NUM_BLOCKS_PADDED: tl.constexpr,
    TILE: tl.constexpr,
    NARROW_TILE: tl.constexpr,
    CAPACITY: tl.constexpr,
):
    """Find a row's limit; greedy rows have none, and nothing of a row that is not finite stays."""
    row = tl.program_id(0)
    temperature, top_k = tl.load(temperatures + row), tl.load(top_ks + row)
    top_p, min_p = tl.load(top_ps + row), tl.load(min_ps + row)
    scale = exponent_scale(temperature)
    block_best, masses, best = load_row_sums(maxima, sums, row, temperature, NUM_BLOCKS, NUM_BLOCKS_PADDED)
    mass = tl.sum(masses, 0)
    is_finite = is_finite_row(mass, best)
    is_drawn = is_finite & (temperature > 0)
    row_logits, row_candidates = logits + row.to(tl.int64) * ROW_STRIDE, candidates + row.to(tl.int64) * CAPACITY
    lowest = tl.full((), float("-inf"), tl.float32)  # logit that counting and weighing leave
    num_kept = tl.full((), VOCAB_SIZE, tl.float64)
    if is_drawn & (top_k > 0):
        num_kept = top_k.to(tl.float64)
        # The k-th best of the blocks' best logits has at least k logits at or above it.
        is_block = (block_best > float("-inf")).to(tl.float64)
        bound = largest_key(to_key(block_best), is_block, 0.0, num_kept)
        lowest, count_above, mass_above = search(
            row_logits, row_candidates, best, scale, tl.where(bound > 0, from_key(bound), float("-inf")), num_kept,
            False, VOCAB_SIZE, TILE, NARROW_TILE, CAPACITY,
        )  # fmt: skip
        if lowest > float("-inf"):  # else all stay
            mass = mass_above + (num_kept - count_above) * tl.exp2((lowest - best) * scale)
    if is_drawn & (top_p < 1):
        # Logits of less than this weight are together less than what top_p may leave out, and min_p drops more.
        weight = tl.maximum((1 - top_p.to(tl.float64)) * mass / num_kept, min_p) * 0.5
        bound = best + tl.log2(weight).to(tl.float32) / scale
        target = tl.maximum(top_p.to(tl.float64) * mass, 1e-300)  # above 0: the best always stays
        lowest, _, _ = search(
            row_logits, row_candidates, best, scale, tl.maximum(lowest, bound), target,
            True, VOCAB_SIZE, TILE, NARROW_TILE, CAPACITY,
        )  # fmt: skip
    divisor = tl.where(temperature > 0, temperature, 1.0)
    limit = tl.maximum(tl.div_rn(lowest - best, divisor), tl.log(min_p))
    tl.store(bests + row, best)
    tl.store(limits + row, tl.where(is_drawn, limit, tl.where(is_finite, float("-inf"), float("nan"))))

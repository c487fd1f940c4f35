"""How kernels write keys and values into pages of few bits."""

import triton
import triton.language as tl


@triton.jit
def convert(values, scale, DTYPE: tl.constexpr, IS_SCALED: tl.constexpr):
    """Convert values [heads, channels] to the dtype of the pages; 8-bit floats are divided by scale, and saturate."""
    if IS_SCALED:
        values = tl.div_rn(values.to(tl.float32), tl.zeros_like(values).to(tl.float32) + scale)
        values = tl.minimum(tl.maximum(values, -448.0), 448.0)
    return values.to(DTYPE)


@triton.jit
def store_packed(values, scale, pages, block_scales, places, is_kept, WIDTH: tl.constexpr):
    """Write values [rows, WIDTH or more] as nvfp4, where ``is_kept`` [rows]; rows begin at ``places``, in bytes."""
    store_divided(divide(values, scale), pages, block_scales, places, is_kept, WIDTH)


@triton.jit
def divide(values, scale):
    """Return values / scale in float32, rounded as torch does."""
    return tl.div_rn(values.to(tl.float32), tl.zeros_like(values).to(tl.float32) + scale)


@triton.jit
def store_divided(values, pages, block_scales, places, is_kept, WIDTH: tl.constexpr):
    """Do what ``store_packed`` does with values that are divided by the scale already."""
    NUM_ROWS: tl.constexpr = values.shape[0]
    NUM_BLOCKS: tl.constexpr = values.shape[1] // 16
    codes, bits = _quantise(tl.reshape(values, [NUM_ROWS, NUM_BLOCKS, 16]))
    new_scales = bits.to(tl.uint8).to(tl.float8e4nv, bitcast=True)
    low, high = tl.split(tl.reshape(codes, [NUM_ROWS, NUM_BLOCKS * 8, 2]))
    pair = tl.arange(0, NUM_BLOCKS * 8)
    tl.store(
        pages + places[:, None] + pair[None, :],
        (low | (high << 4)).to(tl.uint8),
        mask=is_kept[:, None] & (pair < WIDTH // 2)[None, :],
    )
    block = tl.arange(0, NUM_BLOCKS)
    # A head has a scale for every 8 bytes, and so has all before it.
    to_scales = block_scales + (places // 8)[:, None] + block[None, :]
    tl.store(to_scales, new_scales, mask=is_kept[:, None] & (block < WIDTH // 16)[None, :])


@triton.jit
def packing_errors(values):
    """Return by how much ``store_divided`` moves values [rows, channels], float32."""
    NUM_ROWS: tl.constexpr = values.shape[0]
    NUM_BLOCKS: tl.constexpr = values.shape[1] // 16
    blocks = tl.reshape(values, [NUM_ROWS, NUM_BLOCKS, 16])
    codes, bits = _quantise(blocks)
    divisors = tl.zeros_like(blocks) + _read_scales(bits)[:, :, None]
    sizes = _read_sizes(codes) * divisors
    errors = tl.where((codes & 8) != 0, -sizes, sizes) - blocks
    return tl.reshape(errors, [NUM_ROWS, NUM_BLOCKS * 16])


@triton.jit
def _quantise(blocks):
    """Return the codes of blocks [rows, blocks, 16] and the bits of their scales."""
    largest = tl.max(tl.abs(blocks), 2)
    usual_bits = _round_to_e4m3(tl.minimum(tl.div_rn(largest, tl.zeros_like(largest) + 6.0), 448.0))
    codes, least = _round_blocks(blocks, usual_bits)
    bits = usual_bits
    # Those of nvfp4.SCALE_STEPS behind the usual one.
    codes, bits, least = _try_scales(blocks, usual_bits - 1, codes, bits, least)
    codes, bits, least = _try_scales(blocks, usual_bits + 4, codes, bits, least)
    codes, bits, least = _try_scales(blocks, usual_bits + 5, codes, bits, least)
    return codes, bits


@triton.jit
def _round_to_e4m3(x):
    """Return the bits of the nearest e4m3 of each of ``x``, from 0 to 448, ties to even.

    Where a thread converts two values with the GPU's instruction and goes on with their bits, ptxas 12.8 takes those of
    the second from a register that does not have them yet.
    """
    bits = x.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)  # 3 bits of mantissa, exponents less by 120
    subnormal = (x + 16384.0).to(tl.int32, bitcast=True) & 15  # floats from 2 ** 14 on are 2 ** -9 apart, as those are
    return tl.where(x < 0.015625, subnormal, normal)


@triton.jit
def _try_scales(blocks, new_bits, codes, bits, least):
    """Return the codes, scales and errors of blocks with scales of ``new_bits`` where these leave less of an error."""
    new_bits = tl.minimum(tl.maximum(new_bits, 0), 126)
    new_codes, errors = _round_blocks(blocks, new_bits)
    is_better = errors < least
    codes = tl.where(is_better[:, :, None], new_codes, codes)
    return codes, tl.where(is_better, new_bits, bits), tl.minimum(errors, least)


@triton.jit
def _round_blocks(blocks, scale_bits):
    """Return the codes of blocks [rows, blocks, 16] with these e4m3 scales, and the sums of their squared errors."""
    divisors = tl.zeros_like(blocks) + _read_scales(scale_bits)[:, :, None]
    codes = _round_to_codes(tl.where(divisors > 0.0, tl.div_rn(blocks, tl.where(divisors > 0.0, divisors, 1.0)), 0.0))
    errors = _read_sizes(codes) * divisors - tl.abs(blocks)
    return codes, tl.sum(errors * errors, 2)


@triton.jit
def _read_scales(bits):
    """Return the e4m3 numbers of these bits, float32."""
    return bits.to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32)


@triton.jit
def _read_sizes(codes):
    """Return what e2m1 codes stand for without their sign, float32."""
    size = codes & 7
    quarters = tl.where(size < 2, 2 * size, (2 + (size & 1)) << (size >> 1))
    return quarters.to(tl.float32) * 0.25


@triton.jit
def _round_to_codes(x):
    """Return the bits of the nearest e2m1 of each of ``x``, ties to even."""
    size = tl.abs(x)
    codes = (size > 0.25).to(tl.int32) + (size >= 0.75).to(tl.int32) + (size > 1.25).to(tl.int32)
    codes += (size >= 1.75).to(tl.int32) + (size > 2.5).to(tl.int32) + (size >= 3.5).to(tl.int32)
    codes += (size > 5.0).to(tl.int32)
    return codes | ((x < 0.0).to(tl.int32) << 3)

"""All variants of the family, by what their kernels are for."""

from aserve.kernels.cake.decode_variants import DECODE_VARIANTS, SEVERAL_VARIANTS
from aserve.kernels.cake.prefill_variants import PREFILL_VARIANTS
from aserve.kernels.cake.variant import Variant

TABLES: dict[str, tuple[Variant, ...]] = {
    "decode": DECODE_VARIANTS,
    "several": SEVERAL_VARIANTS,
    "prefill": PREFILL_VARIANTS,
}


def variant_names() -> list[str]:
    """Return the names of all variants, by which they can be pinned."""
    return [variant.name for variants in TABLES.values() for variant in variants]

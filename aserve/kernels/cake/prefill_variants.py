"""The table of paged prefill variants: what each serves, and how it is compiled. Fastest first."""

from dataclasses import dataclass

from aserve.kernels.cake.decode_variants import ALL_DTYPES, ON_4_BIT, ON_8_BIT, SAME_16_BIT
from aserve.kernels.cake.prefill_launch import PrefillLaunch
from aserve.kernels.cake.variant import Variant

ANY_GROUP = 1024  # heads are cut into tiles as queries are; no model has more


@dataclass(frozen=True, slots=True)
class PrefillVariant(Variant):
    """One row. Windows, soft-caps, sinks, scales and page sizes are constants or arguments of the one kernel."""

    launch: PrefillLaunch | None  # None: small tiles that fit any GPU, in any dtype


# Launches that compile for Hopper without spilling; the files of launches (tuned_launches.py) say what was measured.
PREFILL_VARIANTS = (
    PrefillVariant("prefill-16-d64", SAME_16_BIT, range(1, 65), ANY_GROUP, PrefillLaunch(128, 64, 4, 3)),
    PrefillVariant("prefill-16-d128", SAME_16_BIT, range(65, 129), ANY_GROUP, PrefillLaunch(128, 128, 8, 3)),
    PrefillVariant("prefill-16-d256", SAME_16_BIT, range(129, 257), ANY_GROUP, PrefillLaunch(128, 32, 8, 3)),
    PrefillVariant("prefill-8-d64", ON_8_BIT, range(1, 65), ANY_GROUP, PrefillLaunch(128, 64, 4, 3)),
    PrefillVariant("prefill-8-d128", ON_8_BIT, range(65, 129), ANY_GROUP, PrefillLaunch(128, 128, 8, 3)),
    PrefillVariant("prefill-8-d256", ON_8_BIT, range(129, 257), ANY_GROUP, PrefillLaunch(128, 32, 8, 3)),
    PrefillVariant("prefill-4-d64", ON_4_BIT, range(1, 65), ANY_GROUP, PrefillLaunch(64, 64, 4, 3)),
    PrefillVariant("prefill-4-d128", ON_4_BIT, range(65, 129), ANY_GROUP, PrefillLaunch(128, 128, 8, 3)),
    PrefillVariant("prefill-4-d256", ON_4_BIT, range(129, 257), ANY_GROUP, PrefillLaunch(64, 32, 8, 3)),
    PrefillVariant("prefill-plain", ALL_DTYPES, range(1, 513), ANY_GROUP, None),
)

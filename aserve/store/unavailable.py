"""What a request is told while its store cannot be used."""

from aserve.errors import CapacityError


def store_unavailable() -> CapacityError:
    """Return the error for a store that is out of reach or broken, with when to try again."""
    return CapacityError("the store of responses cannot be reached at present", retry_after_s=2)

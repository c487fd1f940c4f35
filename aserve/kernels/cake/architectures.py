"""Facts of the GPUs that the family's launches must fit, by compute capability."""

SHARED_BYTES = {  # that one program can have, by NVIDIA's programming guide
    (8, 0): 163 << 10,
    (8, 6): 99 << 10,
    (8, 7): 163 << 10,
    (8, 9): 99 << 10,
    (9, 0): 227 << 10,
    (10, 0): 227 << 10,
    (10, 3): 227 << 10,
    (11, 0): 227 << 10,
    (12, 0): 99 << 10,
    (12, 1): 99 << 10,
}
RESERVED_BYTES = 1 << 10  # beside that, for each program on a multiprocessor


def refuse_architecture(capability: tuple[int, int]) -> str | None:
    """Say so if there are no launches for GPUs of ``capability``."""
    if capability in SHARED_BYTES:
        return None
    known = ", ".join(f"{major}.{minor}" for major, minor in SHARED_BYTES)
    return f"it has no launches for compute capability {capability[0]}.{capability[1]}, only for {known}"

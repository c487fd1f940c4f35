"""Counts the kernels that Triton makes ready, so that one made while requests wait can be noticed."""

from typing import Any

import triton


class CompileCounter:
    """Counts from its creation on, kernels loaded from Triton's cache on disk included: those take a while, too."""

    def __init__(self) -> None:
        self._count = 0
        self._marked = 0
        self._previous = triton.knobs.runtime.jit_post_compile_hook
        triton.knobs.runtime.jit_post_compile_hook = self._count_one

    def mark(self) -> None:
        """Count from here on."""
        self._marked = self._count

    def compilations(self) -> int:
        """Return how many kernels were made ready since the last mark."""
        return self._count - self._marked

    def close(self) -> None:
        """Stop counting; counters close in the reverse order of their creation."""
        triton.knobs.runtime.jit_post_compile_hook = self._previous

    def _count_one(self, **details: Any) -> bool | None:
        self._count += 1
        return None if self._previous is None else self._previous(**details)

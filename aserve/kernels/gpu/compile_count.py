"""Counts the kernels that Triton makes ready, so that one made while requests wait can be noticed."""

from typing import Any

import triton


class CompileCounter:
    """Counts from its creation on, kernels loaded from Triton's cache on disk included: those take a while, too."""

    def __init__(self) -> None:
        self._count = 0
        self._marked = 0
        self._is_closed = False
        self._previous = triton.knobs.runtime.jit_post_compile_hook
        triton.knobs.runtime.jit_post_compile_hook = self._count_one

    def mark(self) -> None:
        """Count from here on."""
        self._marked = self._count

    def compilations(self) -> int:
        """Return how many kernels were made ready since the last mark."""
        return self._count - self._marked

    def close(self) -> None:
        """Stop counting. Counters made later, those of another engine, go on; the last to close takes all hooks out."""
        self._is_closed = True
        hook = triton.knobs.runtime.jit_post_compile_hook
        while isinstance(counter := getattr(hook, "__self__", None), CompileCounter) and counter._is_closed:
            hook = counter._previous
        triton.knobs.runtime.jit_post_compile_hook = hook

    def _count_one(self, **details: Any) -> bool | None:
        self._count += not self._is_closed
        return None if self._previous is None else self._previous(**details)

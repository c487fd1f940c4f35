"""The counter of kernels made ready, driven through the hook that Triton calls."""

from collections.abc import Iterator
from typing import Any

import pytest
import triton

from aserve.kernels.gpu.compile_count import CompileCounter


@pytest.fixture
def counter() -> Iterator[CompileCounter]:
    counter = CompileCounter()
    yield counter
    counter.close()


def compile_one(**details: Any) -> None:
    """Do what Triton does when a kernel is compiled."""
    triton.knobs.runtime.jit_post_compile_hook(**details)


def test_counts_since_the_mark(counter: CompileCounter) -> None:
    assert counter.compilations() == 0
    compile_one(key="a")
    compile_one(key="b")
    assert counter.compilations() == 2
    counter.mark()
    assert counter.compilations() == 0
    compile_one(key="c")
    assert counter.compilations() == 1


def test_a_hook_that_was_there_is_still_called(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", lambda **details: seen.append(details))
    before = triton.knobs.runtime.jit_post_compile_hook
    counter = CompileCounter()
    compile_one(key="a")
    counter.close()
    compile_one(key="b")
    assert (counter.compilations(), seen) == (1, [{"key": "a"}, {"key": "b"}])
    assert triton.knobs.runtime.jit_post_compile_hook is before


@pytest.mark.parametrize("first_to_close", [0, 1])
def test_one_of_two_counters_closes_and_the_other_goes_on(first_to_close: int) -> None:
    before = triton.knobs.runtime.jit_post_compile_hook
    counters = [CompileCounter(), CompileCounter()]
    closed = counters.pop(first_to_close)
    compile_one(key="a")
    closed.close()
    compile_one(key="b")
    assert (closed.compilations(), counters[0].compilations()) == (1, 2)
    counters[0].close()
    assert triton.knobs.runtime.jit_post_compile_hook is before

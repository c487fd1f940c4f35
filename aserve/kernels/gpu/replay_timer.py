"""Times kernels by replaying a captured graph, which leaves the host out of the measurement."""

import statistics
from collections.abc import Callable, Sequence

import torch

REPLAYS = 15
COLD_BYTES = 256 << 20  # several times the second-level cache of any GPU at hand


def time_calls(calls: Sequence[Callable[[], object]]) -> float:
    """Return the microseconds that one of ``calls`` takes, the median over replays of all of them in a row."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())  # on which the inputs are drawn
    with torch.cuda.stream(stream):
        for call in calls[:2]:  # compiles, and makes the handles that a capture cannot
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):  # not torch.cuda.graph, which collects garbage: hundreds of graphs are captured
        graph.capture_begin()
        for call in calls:
            call()
        graph.capture_end()
    times_ms = [_replay(graph) for _ in range(REPLAYS + 2)][2:]
    return statistics.median(times_ms) * 1e3 / len(calls)


def num_cold_copies(num_bytes: int) -> int:
    """Return how many copies of ``num_bytes`` must be used in turn for each to come from memory, not from cache."""
    return max(2, min(COLD_BYTES // max(num_bytes, 1) + 1, 64))


def _replay(graph: torch.cuda.CUDAGraph) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))

"""FlashInfer's kernels and a GPU's asynchronous copies, played on the CPU."""

from collections.abc import Callable

import torch
from torch import Tensor

from aserve.attention.base import AttentionKind, AttentionProblem
from aserve.attention.flash_infer_kernels import Call, PlanRequest, Workspace, window_left
from aserve.attention.page_lists import PageLists
from aserve.attention.staging_ring import StagingRing


class CopyQueue:
    """The stream: copies from pinned memory are made only when something waits for them, or all at once."""

    def __init__(self) -> None:
        self.pending: list[Callable[[], None]] = []
        self.num_waits = 0

    def enqueue(self, source: Tensor, target: Tensor) -> None:
        self.pending.append(lambda: target.copy_(source))

    def run(self, count: int | None = None) -> None:
        count = len(self.pending) if count is None else count
        for copy in self.pending[:count]:
            copy()
        del self.pending[:count]


class QueueEvent:
    """Done when all that was enqueued before its record has run."""

    def __init__(self, queue: CopyQueue) -> None:
        self._queue = queue
        self._last: Callable[[], None] | None = None

    def record(self) -> None:
        self._last = self._queue.pending[-1] if self._queue.pending else None

    def synchronize(self) -> None:
        if self._last in self._queue.pending:
            self._queue.num_waits += 1
            self._queue.run(self._queue.pending.index(self._last) + 1)


class PlayedKernel:
    """Attends with what lies in ``workspace.integers`` and the lists on the device, as the real kernel does.

    Queries are found by the lists on the device, outputs by the plan's; captured plans depend on the sizes only.
    """

    def __init__(
        self, kind: AttentionKind, problem: AttentionProblem, queue: CopyQueue, *, one_row_a_seq: bool
    ) -> None:
        self.kind = kind
        self.requests: list[PlanRequest] = []
        self.changes_plan = False
        self._queue = queue
        self._one_row_a_seq = one_row_a_seq

    def plan(self, request: PlanRequest, workspace: Workspace, staging: Tensor) -> list[int]:
        self.requests.append(request)
        written = torch.cat((request.query_starts, request.page_starts)).view(torch.uint8)
        staging[: len(written)] = written
        self._queue.enqueue(staging[: len(written)], workspace.integers[: len(written)])
        splits_keys = request.splits_keys or self._one_row_a_seq  # the kernel without tensor cores does as it likes
        sizes = [len(request.query_starts), request.num_rows, int(splits_keys)]
        if request.is_captured and not self.changes_plan:
            return sizes
        return [*sizes, int(request.page_starts[-1])]

    def run(self, call: Call, plan: list[int], lists: PageLists, workspace: Workspace) -> None:
        self._queue.run()
        size = plan[0]
        output_starts, page_starts = workspace.integers[: 8 * size].view(torch.int32).view(2, size).tolist()
        assert lists.starts.tolist() == page_starts, "host and device see different pages"
        query_starts = lists.query_starts.tolist()
        for i in range(1, size - 1):
            key_len = (page_starts[i + 1] - page_starts[i] - 1) * call.layer_kv.key.shape[1] + int(
                lists.last_page_lens[i]
            )
            pages = lists.pages[page_starts[i] : page_starts[i + 1]].long()
            if self._one_row_a_seq:
                self._attend(call, i - 1, i - 1, 1, pages, key_len)
                continue
            num_queries = query_starts[i + 1] - query_starts[i]
            assert num_queries == output_starts[i + 1] - output_starts[i], "host and device see different queries"
            self._attend(call, query_starts[i], output_starts[i], num_queries, pages, key_len)

    def _attend(self, call: Call, query: int, output: int, num_queries: int, pages: Tensor, key_len: int) -> None:
        kind, group = self.kind, self.kind.num_heads // self.kind.num_kv_heads
        keys, values = (
            pool[pages].flatten(0, 1)[:key_len].double().repeat_interleave(group, 1)
            for pool in (call.layer_kv.key, call.layer_kv.value)
        )
        for j in range(num_queries):
            position = key_len - num_queries + j
            first = 0 if window_left(kind) < 0 else max(0, position - window_left(kind))
            seen = slice(first, position + 1)
            scores = torch.einsum("hd,khd->hk", call.q[query + j].double(), keys[seen]) * kind.scale
            scores = scores * call.layer_kv.key_scale
            row = torch.einsum("hk,khd->hd", scores.softmax(-1), values[seen])
            call.out[output + j] = row.to(call.out.dtype)
            if call.lse is not None:
                call.lse[output + j] = (scores.logsumexp(-1) / torch.tensor(2.0).log()).float()


def played_ring(queue: CopyQueue) -> Callable[[int, int], StagingRing]:
    def new_ring(num_buffers: int, num_bytes: int) -> StagingRing:
        return StagingRing(num_buffers, num_bytes, pin=False, new_event=lambda: QueueEvent(queue))

    return new_ring

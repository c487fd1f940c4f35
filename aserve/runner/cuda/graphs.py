"""All graphs of a runner: captured once, largest first, in one memory pool; found by the size of a step."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tqdm import tqdm

from aserve.attention.base import AttentionBackend, CaptureShape
from aserve.runner.cuda.body import Body, CapturedBody
from aserve.runner.cuda.head import CapturedHead, Head
from aserve.runner.cuda.sizes import MAX_CHUNKS, decode_shape, decode_sizes, fitting, mixed_shape, token_sizes
from aserve.runner.cuda.staging import Staging
from aserve.scheduler.plan import StepPlan


@dataclass(frozen=True, slots=True)
class GraphSizes:
    """What is captured, ascending: batches of decodes, token counts of mixed steps, numbers of samples."""

    decodes: list[int]
    tokens: list[int]
    heads: list[int]
    max_num_seqs: int

    @classmethod
    def choose(
        cls,
        backend: AttentionBackend,
        max_num_seqs: int,
        max_num_tokens: int,
        *,
        max_num_drafts: int = 0,
        enabled: bool,
    ) -> "GraphSizes":
        """Return the sizes that ``backend`` can capture; none unless ``enabled``."""
        heads = decode_sizes(min(max_num_seqs + max_num_drafts, max_num_tokens))
        decodes = decode_sizes(min(max_num_seqs, max_num_tokens))  # a decode is a token, and inputs have room for these
        return cls(
            decodes if enabled and backend.captures_decodes else [],
            token_sizes(max_num_tokens) if enabled and backend.captures_chunks else [],
            heads if enabled else [],
            max_num_seqs,
        )

    @property
    def count(self) -> int:
        """Number of graphs."""
        return len(self.decodes) + len(self.tokens) + 2 * len(self.heads)

    def extremes(self) -> tuple["GraphSizes", "GraphSizes"]:
        """Return the largest size of each kind, and the smallest of each: what memory is estimated from."""
        largest, smallest = (
            GraphSizes(self.decodes[part], self.tokens[part], self.heads[part], self.max_num_seqs)
            for part in (slice(-1, None), slice(0, 1))
        )
        return largest, smallest

    def shapes(self) -> Iterator[CaptureShape]:
        """Yield the shapes of all bodies, largest first, so that smaller ones find room in the memory pool."""
        for size in reversed(self.tokens):
            yield mixed_shape(size, self.max_num_seqs)
        for size in reversed(self.decodes):
            yield decode_shape(size)

    def body_shape(self, plan: StepPlan) -> CaptureShape | None:
        """Return the smallest captured shape that holds ``plan``, None if it must run without a graph."""
        if plan.is_decode:
            size = fitting(self.decodes, len(plan.rows))
            return decode_shape(size) if size is not None else None
        size = fitting(self.tokens, plan.num_tokens)
        if size is None or len(plan.rows) - plan.num_decodes > MAX_CHUNKS:
            return None
        return mixed_shape(size, self.max_num_seqs)


class Graphs:
    """Captured bodies by shape and heads by number of samples."""

    def __init__(self, sizes: GraphSizes, pool: Any) -> None:
        """Take the memory pool's handle, which graphs that never run at the same time may share."""
        self.sizes = sizes
        self._pool = pool
        self._bodies: dict[CaptureShape, CapturedBody] = {}
        self._heads: dict[int, CapturedHead] = {}

    def capture(self, body: Body, head: Head, staging: Staging, *, show_progress: bool) -> None:
        """Capture everything on the current stream."""
        shapes = list(self.sizes.shapes())
        total = len(shapes) + len(self.sizes.heads)
        with tqdm(total=total, desc="capturing CUDA graphs", disable=not show_progress, leave=False) as progress:
            for shape in shapes:
                self._bodies[shape] = body.capture(shape, staging.send_padding(shape), self._pool)
                progress.update()
            for size in reversed(self.sizes.heads):
                self._heads[size] = head.capture(size, self._pool)
                progress.update()

    def destroy(self) -> None:
        """Give back what graphs hold, on the device and of the group of ranks, whoever may still refer to them."""
        for body in self._bodies.values():
            body.graph.reset()
        for head in self._heads.values():
            head.sampling.reset()
            head.scoring.reset()

    def body(self, plan: StepPlan) -> CapturedBody | None:
        """Return the graph that ``plan`` fits into."""
        shape = self.sizes.body_shape(plan)
        return None if shape is None else self._bodies[shape]

    def head(self, num_sampled: int) -> tuple[int, CapturedHead | None]:
        """Return the padded number of samples and the graphs for it."""
        size = fitting(self.sizes.heads, num_sampled)
        return (num_sampled, None) if size is None else (size, self._heads[size])

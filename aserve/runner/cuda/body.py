"""The forward of one step up to the hidden states of its sampled rows, captured for a shape or run as it is."""

from dataclasses import dataclass
from typing import Any

import torch

from aserve.attention.base import AttentionBatch, CaptureShape, StepLens
from aserve.attention.context import ForwardContext
from aserve.kernels.gpu.step_inputs import PageSlots, gather_inputs
from aserve.runner.cuda.device_state import DeviceState
from aserve.runner.executor import DeviceParts
from aserve.scheduler.plan import StepPlan


@dataclass(frozen=True, slots=True)
class CapturedBody:
    """A graph and what must be told or read around its replay."""

    graph: torch.cuda.CUDAGraph
    shape: CaptureShape
    plan: Any  # the backend's


class Body:
    """Runs the layers over the inputs in ``state``; leaves ``state.hidden`` and of it the sampled rows."""

    def __init__(self, parts: DeviceParts, state: DeviceState) -> None:
        self._parts = parts
        self._state = state

    def capture(self, shape: CaptureShape, lens: StepLens, pool: Any) -> CapturedBody:
        """Capture ``shape`` on the current stream; the state holds inputs of a step of that shape, and ``lens`` its."""
        backend = self._parts.backend
        plan = backend.prepare_capture(shape, self._state.tables(shape))
        backend.prepare_replay(plan, lens)
        self._run(shape, plan)  # compiles and loads what is new, which a capture cannot
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"):
            self._run(shape, plan)
        return CapturedBody(graph, shape, plan)

    def replay(self, body: CapturedBody, lens: StepLens) -> None:
        """Enqueue a captured forward for the step of ``lens``."""
        self._parts.backend.prepare_replay(body.plan, lens)
        body.graph.replay()

    def run_eagerly(self, step: StepPlan, shape: CaptureShape, lens: StepLens) -> None:
        """Enqueue the forward of a step that no graph serves; ``shape`` is exact."""
        self._run(shape, self._parts.backend.plan(self._batch(step, shape, lens)))

    def _run(self, shape: CaptureShape, plan: Any) -> None:
        parts, state = self._parts, self._state
        inputs = state.tokens(shape.num_tokens)
        pages = PageSlots(state.page_table, parts.page_size, parts.shard, parts.num_pages)
        gather_inputs(state.spans(shape), state.token_pool, pages, inputs)
        parts.backend.convert(plan)
        ctx = ForwardContext(
            positions=inputs.positions,
            slot_mapping=inputs.slot_mapping,
            backend=parts.backend,
            plan=plan,
            layers_kv=parts.layers_kv,
            operators=parts.operators,
        )
        hidden = parts.model.forward(inputs.token_ids, ctx, out=state.hidden[: shape.num_tokens])
        num_sampled = state.num_sampled(shape)
        places = state.arrays.sampled_tokens[:num_sampled]
        torch.index_select(hidden, 0, places, out=state.sampled_hidden[:num_sampled])

    def _batch(self, step: StepPlan, shape: CaptureShape, lens: StepLens) -> AttentionBatch:
        arrays, num_seqs = self._state.arrays, len(step.rows)
        width = -(-int(lens.key_lens.max()) // self._parts.page_size)
        cu_query_lens, key_lens = arrays.query_starts[: num_seqs + 1], arrays.key_lens[:num_seqs]
        cu_key_lens = cu_query_lens
        if any(step.num_computed):
            cu_key_lens = torch.cat((key_lens.new_zeros(1), key_lens.cumsum(0, dtype=torch.int32)))
        return AttentionBatch(
            query_lens=step.num_scheduled,
            key_lens=lens.key_lens.tolist(),
            num_decodes=shape.num_decodes,
            cu_query_lens=cu_query_lens,
            key_lens_device=key_lens,
            page_table=self._state.page_table[:, :width].index_select(0, arrays.rows[:num_seqs]),
            page_size=self._parts.page_size,
            cu_key_lens=cu_key_lens,
        )

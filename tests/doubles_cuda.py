"""A CUDA runner without a device: streams and events that are always done, graphs that run what they captured.

Triton's interpreter runs the kernels. What is padded, staged, replayed and read back is as on a device; what
overlaps there is one after the other here.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from aserve.attention.base import AttentionBatch, CaptureShape, StepLens, StepTables
from aserve.attention.torch_backend import TorchBackend, TorchPlan
from aserve.runner.cuda.body import Body, CapturedBody
from aserve.runner.cuda.cuda_runner import CudaRunner
from aserve.runner.cuda.device_state import DeviceState, StateSizes
from aserve.runner.cuda.graphs import Graphs, GraphSizes
from aserve.runner.cuda.head import CapturedHead, Head
from aserve.runner.cuda.sizes import MAX_CHUNKS
from aserve.runner.cuda.staging import Staging
from aserve.runner.cuda.step_arrays import ArrayLayout
from aserve.runner.cuda.streams import UploadSlot, UploadSlots
from aserve.runner.executor import DeviceParts
from aserve.runner.prompt_scores import PromptScores
from aserve.runner.transfer import Transfer
from aserve.sampling.gpu.token_picker import TokenPicker
from aserve.sampling.sampler import Sampler
from aserve.scheduler.limits import Limits

CPU = torch.device("cpu")
EOS = 2


class IdleStream:
    """Does everything at once."""

    def __init__(self, *_: Any, **__: Any) -> None:
        """Take what a stream takes."""

    def wait_event(self, event: Any) -> None:
        """Nothing is ever pending."""

    def synchronize(self) -> None:
        """Nothing is ever pending."""


class IdleEvent:
    """Has always happened."""

    def __init__(self, *_: Any, **__: Any) -> None:
        """Take what an event takes."""

    def record(self, stream: Any = None) -> None:
        """Nothing is ever pending."""

    def synchronize(self) -> None:
        """Nothing is ever pending."""

    def query(self) -> bool:
        return True


@dataclass
class PlayedGraph:
    """Runs again what was captured; its tensors are the same each time."""

    replay: Callable[[], None]
    is_reset: bool = False

    def reset(self) -> None:
        self.is_reset = True


@dataclass
class PlayedCapture:
    """A captured plan: ``plan`` is made anew for each replay."""

    shape: CaptureShape
    tables: StepTables
    plan: TorchPlan | None = None


class CapturingBackend(TorchBackend):
    """The reference as a backend that captures decodes and chunks; a replay plans from the tables on the device."""

    @property
    def captures_decodes(self) -> bool:
        return True

    @property
    def captures_chunks(self) -> bool:
        return True

    def prepare_capture(self, shape: CaptureShape, tables: StepTables) -> PlayedCapture:
        return PlayedCapture(shape, tables)

    def convert(self, plan: Any) -> None:
        """The plan is made on the host."""

    def prepare_replay(self, plan: PlayedCapture, lens: StepLens) -> None:
        num_decodes, chunk_lens = int(lens.cu_query_lens[0]), np.diff(lens.cu_query_lens)
        places = [*range(num_decodes), *(plan.shape.num_decodes + np.flatnonzero(chunk_lens)).tolist()]
        tables, key_lens = plan.tables, plan.tables.key_lens[places]
        assert key_lens.tolist() == lens.key_lens[places].tolist(), "host and device disagree"
        batch = AttentionBatch(
            query_lens=[1] * num_decodes + chunk_lens[chunk_lens > 0].tolist(),
            key_lens=key_lens.tolist(),
            num_decodes=num_decodes,
            cu_query_lens=tables.cu_query_lens,
            key_lens_device=key_lens,
            page_table=tables.page_table[tables.rows[places].long()],
            page_size=tables.page_size,
        )
        plan.plan = self.plan(batch)

    def forward(self, q: Tensor, layer_kv: Any, plan: Any, *args: Any, **kwargs: Any) -> Any:
        return super().forward(q, layer_kv, plan.plan if isinstance(plan, PlayedCapture) else plan, *args, **kwargs)


def capture_body(self: Body, shape: CaptureShape, lens: StepLens, pool: Any) -> CapturedBody:
    plan = self._parts.backend.prepare_capture(shape, self._state.tables(shape))
    return CapturedBody(PlayedGraph(lambda: self._run(shape, plan)), shape, plan)  # type: ignore[arg-type]


def capture_head(self: Head, size: int, pool: Any) -> CapturedHead:
    graphs = PlayedGraph(lambda: self.score_and_sample(size)), PlayedGraph(lambda: self.score(size))
    return CapturedHead(*graphs)  # type: ignore[arg-type]


def allocate_slot(self: UploadSlots, num_words: int) -> UploadSlot:
    host, twin = torch.zeros((2, num_words), dtype=torch.int32)
    return UploadSlot(host, twin, self._layout, IdleEvent(), IdleEvent())  # type: ignore[arg-type]


def play_cuda(patch: pytest.MonkeyPatch) -> None:
    """Let torch take streams, events and pinned memory for granted."""
    for name, double in (("Stream", IdleStream), ("Event", IdleEvent), ("current_stream", IdleStream)):
        patch.setattr(torch.cuda, name, double)
    patch.setattr(torch.cuda, "set_stream", lambda stream: None)
    patch.setattr(torch.cuda, "empty_cache", lambda: None)
    allocate = torch.empty
    patch.setattr(torch, "empty", lambda *args, pin_memory=False, **options: allocate(*args, **options))
    patch.setattr(UploadSlots, "_allocate", allocate_slot)
    patch.setattr(Body, "capture", capture_body)
    patch.setattr(Head, "capture", capture_head)


def make_cuda_runner(parts: DeviceParts, *, max_num_drafts: int = 0, has_graphs: bool = True) -> CudaRunner:
    """Put a runner together as ``runner/cuda/build.py`` does, under ``play_cuda``; the backend must capture."""
    shape, compute = parts.model.config, IdleStream()
    layout = ArrayLayout(parts.max_num_seqs, max_num_drafts)
    sizes = StateSizes(
        max_num_seqs=parts.max_num_seqs,
        max_num_drafts=max_num_drafts,
        max_model_len=parts.max_model_len,
        max_num_tokens=parts.max_num_tokens,
        hidden_size=shape.hidden_size,
        vocab_size=shape.vocab_size,
        page_size=parts.page_size,
    )
    state = DeviceState(sizes, layout, torch.float32, CPU)
    state.point_at(parts.num_pages)
    upload = Transfer(CPU).upload
    picker = TokenPicker(len(state.logits), shape.vocab_size, CPU)
    sampler = Sampler(parts.max_num_seqs + 1, shape.vocab_size, {EOS}, CPU, upload, picker)
    staging = Staging(UploadSlots(layout, 64, CPU, compute), layout, state, sampler)  # type: ignore[arg-type]
    body, head = Body(parts, state), Head(parts.model, state, picker)
    most = parts.max_num_seqs, parts.max_num_tokens
    chosen = GraphSizes.choose(parts.backend, *most, max_num_drafts=max_num_drafts, enabled=has_graphs)
    graphs = Graphs(chosen, None)
    graphs.capture(body, head, staging, show_progress=False)
    limits = Limits(
        vocab_size=shape.vocab_size,
        max_model_len=parts.max_model_len,
        max_num_seqs=parts.max_num_seqs,
        max_num_batched_tokens=parts.max_num_tokens,
        num_pages=parts.num_pages,
        page_size=parts.page_size,
        max_num_chunks=MAX_CHUNKS,
        max_num_drafts=max_num_drafts,
    )
    return CudaRunner(
        limits,
        state=state,
        staging=staging,
        body=body,
        head=head,
        graphs=graphs,
        sampler=sampler,
        prompt_scores=PromptScores(parts.model, state.token_pool),
        upload=upload,
        compute=compute,  # type: ignore[arg-type]
    )

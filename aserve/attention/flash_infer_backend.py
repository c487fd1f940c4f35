"""FlashInfer's paged kernels: planned on the host for each step, with lists of pages that are made on the device.

A step has up to two sections, its decodes and its chunks, each with a plan for every kind of layers. Captured plans
have a fixed grid: thread blocks without work get an empty sequence that stands first in every section.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from aserve.attention.base import (
    PHASES,
    AttentionBackend,
    AttentionBatch,
    AttentionProblem,
    AttentionSpec,
    CaptureShape,
    LayerKV,
    LseBase,
    Phase,
    StepLens,
    StepTables,
    common_scale,
    dtype_name,
    refuse_device,
)
from aserve.attention.flash_infer_kernels import Call, load_kernel
from aserve.attention.flash_infer_planner import KernelLoader, Section, SectionPlanner
from aserve.attention.page_lists import PageLists, fill_page_lists, scale_rows
from aserve.attention.staging_ring import StagingRing

MIN_CAPABILITY = (8, 0)
HEAD_DIMS = (64, 128, 256)
QUERY_DTYPES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class FlashInferPlan:
    """A step's sections that are not empty, decodes first; ``num_decodes`` is the captured number."""

    sections: list[Section]
    num_decodes: int


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """What a captured plan of decodes depends on."""

    num_seqs: int
    num_decodes: int
    splits_keys: bool  # whether it may
    num_pages: bytes | None  # of each sequence; None for a plan that serves any

    def serves(self, wanted: "DecodePlan") -> bool:
        """Whether this plan is the one that is wanted."""
        return self == wanted or (self.num_pages is None and self == replace(wanted, num_pages=None))


class FlashInferBackend(AttentionBackend):
    """Reads pools of 16-bit floats and float8, of any page size and group of heads."""

    name = "fi"
    lse_base: LseBase = "2"

    def __init__(
        self,
        problem: AttentionProblem,
        device: torch.device,
        phases: tuple[Phase, ...] = PHASES,
        *,
        load: KernelLoader = load_kernel,
        new_ring: Callable[[int, int], StagingRing] = StagingRing,
    ) -> None:
        super().__init__(problem, device, phases)
        self.planner = SectionPlanner(problem, device, phases, load, new_ring)
        self._captured_lists: dict[Phase, PageLists] = {}
        self._planned_decodes: DecodePlan | None = None  # that the workspaces hold
        self._rows = torch.arange(problem.max_num_seqs, dtype=torch.int32, device=device)

    @classmethod
    def refuse(cls, problem: AttentionProblem, phase: Phase) -> str | None:
        if reason := refuse_device(problem, MIN_CAPABILITY):
            return reason
        if problem.dtype not in QUERY_DTYPES:
            return f"it computes in float16 and bfloat16, not in {dtype_name(problem.dtype)}"
        if problem.kv_dtype not in (problem.dtype, torch.float8_e4m3fn):
            return f"it does not read {dtype_name(problem.kv_dtype)} with queries in {dtype_name(problem.dtype)}"
        if problem.has_head_scales:
            return "it takes one scale for all KV heads of a layer, not one for each"
        if head_dims := sorted({kind.head_dim for kind in problem.kinds} - set(HEAD_DIMS)):
            return f"it knows head_dim {', '.join(map(str, HEAD_DIMS))}, not {head_dims[0]}"
        if any(kind.has_sinks for kind in problem.kinds):
            return "its kernels for this GPU have no attention sinks"
        return None

    def plan(self, batch: AttentionBatch) -> FlashInferPlan:
        num_decodes, num_seqs = batch.num_decodes, len(batch.query_lens)
        sections: list[Section] = []
        if num_decodes:
            sections.append(self._plan_eagerly("decode", batch, 0, num_decodes))
        if num_decodes < num_seqs:
            sections.append(self._plan_eagerly("prefill", batch, num_decodes, num_seqs))
        return FlashInferPlan(sections, num_decodes)

    def _plan_eagerly(self, phase: Phase, batch: AttentionBatch, start: int, stop: int) -> Section:
        self._planned_decodes = None
        key_lens = np.array(batch.key_lens[start:stop], np.int32)
        query_lens = batch.query_lens[start:stop]
        tables = StepTables(
            page_table=batch.page_table[start:stop],
            rows=self._rows[: stop - start],
            key_lens=batch.key_lens_device[start:stop],
            cu_query_lens=batch.cu_query_lens[batch.num_decodes :],
            page_size=batch.page_size,
        )
        num_pages = int((-(-key_lens // batch.page_size)).sum())
        lists = PageLists.allocate(stop - start, num_pages, self.device)
        fill_page_lists(tables, lists, are_decodes=phase == "decode", is_relative=phase == "prefill")
        section = Section(phase, start, sum(query_lens), tables, lists, True, False, {})
        query_starts = np.zeros(stop - start + 2, np.int32)
        np.cumsum(query_lens, out=query_starts[2:])
        self.planner.plan(section, key_lens, query_starts)
        return section

    def forward(
        self,
        q: Tensor,
        layer_kv: LayerKV,
        plan: FlashInferPlan,
        spec: AttentionSpec,
        *,
        return_lse: bool = False,
        out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        out = q.new_empty(q.shape) if out is None else out
        lse = q.new_empty(q.shape[:2], dtype=torch.float32) if return_lse else None
        for section in plan.sections:
            kernel_plan = section.plans[spec.kind]
            tokens = slice(section.first, section.first + section.num_tokens)
            call = Call(q[tokens], out[tokens], None if lse is None else lse[tokens], layer_kv)
            kernel_plan.kernel.run(call, kernel_plan.info, section.lists, kernel_plan.workspace)
            if (value_scale := common_scale(layer_kv.value_scale)) != 1.0:
                scale_rows(call.out, section.lists.query_starts, value_scale)
        return out, lse

    @property
    def captures_decodes(self) -> bool:
        return True

    @property
    def captures_chunks(self) -> bool:
        return True

    def prepare_capture(self, shape: CaptureShape, tables: StepTables) -> FlashInferPlan:
        num_decodes, num_chunks = shape.num_decodes, shape.num_chunks
        sections = []
        if num_decodes:
            splits_keys = bool(num_chunks) or self.planner.may_split_decodes(num_decodes)
            section = tables.section(0, num_decodes)
            sections.append(self._captured_section("decode", num_decodes, section, splits_keys))
        if num_chunks:
            section = tables.section(num_decodes, num_decodes + num_chunks)
            sections.append(self._captured_section("prefill", shape.num_tokens, section, False))
        return FlashInferPlan(sections, num_decodes)

    def _captured_section(self, phase: Phase, num_tokens: int, tables: StepTables, splits_keys: bool) -> Section:
        num_seqs = len(tables.rows)
        most = self.problem.max_num_seqs if phase == "decode" else self.problem.max_num_tokens
        if num_tokens > most:
            raise ValueError(f"{self.name}: {num_tokens} tokens of {phase} are more than its workspaces' {most}")
        num_pages = num_seqs * tables.page_table.shape[1]
        lists = self._captured_lists.get(phase)
        if lists is None or len(lists.last_page_lens) <= num_seqs or len(lists.pages) < num_pages:
            lists = self._captured_lists[phase] = PageLists.allocate(num_seqs, num_pages, self.device)
        return Section(phase, 0, num_tokens, tables, lists.first(num_seqs), splits_keys, True, {})

    def convert(self, plan: FlashInferPlan) -> None:
        for section in plan.sections:
            if section.is_captured:
                fill_page_lists(section.tables, section.lists, are_decodes=section.phase == "decode")

    def prepare_replay(self, plan: FlashInferPlan, lens: StepLens) -> None:
        for section in plan.sections:
            if section.phase == "decode":
                self._plan_decodes(section, lens)
                continue
            # Outputs begin after the queries of earlier sequences: the decodes' are put down to the empty one.
            query_starts = np.concatenate((np.zeros(1, np.int32), lens.cu_query_lens))
            self.planner.plan(section, lens.key_lens[plan.num_decodes :], query_starts)

    def _plan_decodes(self, section: Section, lens: StepLens) -> None:
        """Plan unless the workspaces hold this very plan.

        It depends on the pages of each sequence, or not even on these where keys are not split; so most steps of a
        small batch find it there.
        """
        num_seqs, num_decodes = section.num_tokens, int(lens.cu_query_lens[0])
        key_lens = lens.key_lens[:num_seqs]
        num_pages = (key_lens + (section.tables.page_size - 1)) // section.tables.page_size
        content = DecodePlan(num_seqs, num_decodes, section.splits_keys, num_pages.tobytes())
        if section.plans and self._planned_decodes is not None and self._planned_decodes.serves(content):
            return
        query_starts = np.zeros(num_seqs + 2, np.int32)
        np.minimum(np.arange(num_seqs + 1), num_decodes, out=query_starts[1:], casting="unsafe")
        self.planner.plan(section, key_lens, query_starts)
        self._planned_decodes = replace(content, num_pages=None) if section.is_for_all_lens else content

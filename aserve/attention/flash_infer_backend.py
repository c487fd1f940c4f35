"""FlashInfer's paged kernels: planned on the host for each step, with lists of pages that are made on the device.

A step has up to two sections, its decodes and its chunks, each with a plan for every kind of layers. Captured plans
have a fixed grid: thread blocks without work get an empty sequence that stands first in every section.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from aserve.attention import flash_infer_sizes as sizes
from aserve.attention.base import (
    PHASES,
    AttentionBackend,
    AttentionBatch,
    AttentionKind,
    AttentionProblem,
    AttentionSpec,
    CaptureShape,
    LayerKV,
    LseBase,
    Phase,
    StepLens,
    StepTables,
    dtype_name,
)
from aserve.attention.flash_infer_kernels import (
    Call,
    CudaCoreKernel,
    PagedKernel,
    PlanRequest,
    TensorCoreKernel,
    Workspace,
    splits,
)
from aserve.attention.page_lists import PageLists, fill_page_lists, scale_rows
from aserve.attention.staging_ring import MIN_BUFFERS, StagingRing

HEAD_DIMS = (64, 128, 256)
QUERY_DTYPES = (torch.float16, torch.bfloat16)
CUDA_CORE_GROUPS = (1, 2, 3)  # heads per KV head that decode without tensor cores; that kernel knows 4 and 8 as well

KernelFactory = Callable[..., PagedKernel]


@dataclass(frozen=True, slots=True)
class KernelPlan:
    """One kernel's work in one section."""

    kernel: PagedKernel
    workspace: Workspace
    info: list[int]


@dataclass(frozen=True, slots=True)
class Section:
    """The decodes or the chunks of a step.

    Tokens ``first`` and following are the section's; in a captured step chunks find their first token themselves.
    """

    phase: Phase
    first: int
    num_tokens: int
    tables: StepTables
    lists: PageLists
    splits_keys: bool
    is_captured: bool
    plans: dict[AttentionKind, KernelPlan]


@dataclass(frozen=True, slots=True)
class FlashInferPlan:
    """A step's sections that are not empty, decodes first; ``num_decodes`` is the captured number."""

    sections: list[Section]
    num_decodes: int


class FlashInferBackend(AttentionBackend):
    """Reads pools of 16-bit floats and float8, of any page size, group of heads up to flashinfer's head sizes."""

    name = "fi"
    lse_base: LseBase = "2"
    cuda_core_groups = CUDA_CORE_GROUPS
    enable_pdl = True  # on GPUs that can launch a kernel before the previous one has ended

    def __init__(
        self,
        problem: AttentionProblem,
        device: torch.device,
        phases: tuple[Phase, ...] = PHASES,
        *,
        tensor_core_kernel: KernelFactory = TensorCoreKernel,
        cuda_core_kernel: KernelFactory = CudaCoreKernel,
        new_ring: Callable[[int, int], StagingRing] = StagingRing,
    ) -> None:
        super().__init__(problem, device, phases)
        self._num_sms = count_sms(device)
        enable_pdl = self.enable_pdl and problem.capability >= (9, 0)
        self._kernels: dict[tuple[Phase, AttentionKind], PagedKernel] = {}
        for kind in problem.kinds:
            for phase in phases:
                is_plain = phase == "decode" and self.decodes_without_tensor_cores(kind)
                load = cuda_core_kernel if is_plain else tensor_core_kernel
                self._kernels[phase, kind] = load(kind, problem, enable_pdl=enable_pdl)
        self._workspaces = self._allocate()
        num_bytes = max(len(workspace.integers) for workspace in self._workspaces.values())
        self._ring = new_ring(MIN_BUFFERS * len(self._workspaces), num_bytes)
        self._captured_lists: dict[Phase, PageLists] = {}
        self._planned_decodes: tuple[int, int] | None = None  # graph size and real decodes of the plan on the device
        self._rows = torch.arange(problem.max_num_seqs, dtype=torch.int32, device=device)

    @classmethod
    def refuse(cls, problem: AttentionProblem, phase: Phase) -> str | None:
        if problem.device_type != "cuda":
            return f"it runs on a CUDA device only, not on {problem.device_type}"
        if problem.capability < (8, 0):
            return (
                f"it needs a GPU of compute capability 8.0 or more, not {problem.capability[0]}.{problem.capability[1]}"
            )
        if problem.dtype not in QUERY_DTYPES:
            return f"it computes in float16 and bfloat16, not in {dtype_name(problem.dtype)}"
        if problem.kv_dtype not in (problem.dtype, torch.float8_e4m3fn):
            return f"it does not read {dtype_name(problem.kv_dtype)} with queries in {dtype_name(problem.dtype)}"
        if head_dims := sorted({kind.head_dim for kind in problem.kinds} - set(HEAD_DIMS)):
            return f"it knows head_dim {', '.join(map(str, HEAD_DIMS))}, not {head_dims[0]}"
        if any(kind.has_sinks for kind in problem.kinds):
            return "its kernels for this GPU have no attention sinks"
        return None

    @classmethod
    def decodes_without_tensor_cores(cls, kind: AttentionKind) -> bool:
        """Whether decodes of this kind take the kernel that is better for few heads per KV head."""
        return kind.num_heads // kind.num_kv_heads in cls.cuda_core_groups

    def _allocate(self) -> dict[tuple[Phase, AttentionKind], Workspace]:
        """Allocate integers for every plan of a step, and partial results that all share: kernels run one by one."""
        problem, num_sms = self.problem, self._num_sms
        num_floats = 0
        integers: dict[tuple[Phase, AttentionKind], int] = {}
        for phase, kind in self._kernels:
            if phase == "decode":
                num_seqs = num_rows = problem.max_num_seqs
                num_floats = max(num_floats, sizes.decode_float_bytes(kind, num_seqs, num_sms))
            else:
                num_seqs = num_rows = problem.max_num_tokens  # a chunk has a token at least
                num_floats = max(num_floats, sizes.chunk_float_bytes(kind, num_sms))
            integers[phase, kind] = sizes.integer_bytes(kind, num_seqs, num_rows, num_sms)

        def memory(num_bytes: int) -> Tensor:
            return torch.zeros(num_bytes, dtype=torch.uint8, device=self.device)

        floats = memory(num_floats)
        return {key: Workspace(floats, memory(num_bytes)) for key, num_bytes in integers.items()}

    @property
    def workspace_bytes(self) -> int:
        floats = next(iter(self._workspaces.values())).floats
        lists = sum(lists.num_bytes for lists in self._captured_lists.values())
        return len(floats) + sum(len(workspace.integers) for workspace in self._workspaces.values()) + lists

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
        self._plan_section(section, key_lens, query_starts)
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
            if layer_kv.value_scale != 1.0:
                scale_rows(call.out, section.lists.query_starts, layer_kv.value_scale)
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
            splits_keys = bool(num_chunks) or any(
                self._splits_decodes(kind, num_decodes) for kind in self.problem.kinds
            )
            section = tables.section(0, num_decodes)
            sections.append(self._captured_section("decode", num_decodes, section, splits_keys))
        if num_chunks:
            section = tables.section(num_decodes, num_decodes + num_chunks)
            sections.append(self._captured_section("prefill", shape.num_tokens, section, False))
        return FlashInferPlan(sections, num_decodes)

    def _splits_decodes(self, kind: AttentionKind, num_decodes: int) -> bool:
        """Whether keys may be split. Joining the parts is a kernel of its own, in vain if the batch fills the GPU."""
        return num_decodes <= 2 * sizes.max_split_blocks(kind, self._num_sms)

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
            self._plan_section(section, lens.key_lens[plan.num_decodes :], query_starts)

    def _plan_decodes(self, section: Section, lens: StepLens) -> None:
        """Plan unless the workspaces hold this very plan: where keys are not split, it is the same for all lengths.

        What was asked for does not tell that: the kernel without tensor cores splits keys as it sees fit.
        """
        num_seqs, num_decodes = section.num_tokens, int(lens.cu_query_lens[0])
        if self._planned_decodes == (num_seqs, num_decodes):
            return
        query_starts = np.zeros(num_seqs + 2, np.int32)
        np.minimum(np.arange(num_seqs + 1), num_decodes, out=query_starts[1:], casting="unsafe")
        self._plan_section(section, lens.key_lens[:num_seqs], query_starts)
        is_for_all_lens = not any(splits(plan.info) for plan in section.plans.values())
        self._planned_decodes = (num_seqs, num_decodes) if is_for_all_lens else None

    def _plan_section(self, section: Section, key_lens: NDArray[np.int32], query_starts: NDArray[np.int32]) -> None:
        """Plan for every kind of layers; of a captured plan nothing may differ from what was captured."""
        page_size, num_seqs = section.tables.page_size, len(key_lens)
        page_starts = np.zeros(num_seqs + 2, np.int32)
        np.cumsum((key_lens + (page_size - 1)) // page_size, out=page_starts[2:])
        num_rows = section.num_tokens
        if section.is_captured:
            num_rows += 1 if section.phase == "decode" else num_seqs  # so that a tile fits one query, or all of a chunk
        request = PlanRequest(
            torch.from_numpy(query_starts),
            torch.from_numpy(page_starts),
            num_rows,
            page_size,
            section.is_captured,
            section.splits_keys,
        )
        for kind in self.problem.kinds:
            kernel, workspace = self._kernels[section.phase, kind], self._workspaces[section.phase, kind]
            with self._ring.borrow() as staging:
                if section.is_captured and not section.splits_keys:
                    blocks = sizes.captured_blocks(kind, num_seqs + 1, num_rows, 16, self._num_sms)
                    staging[: 12 * blocks + 48].zero_()  # blocks that the plan leaves out get the empty sequence
                info = kernel.plan(request, workspace, staging)
            captured = section.plans.get(kind)
            if captured is not None and captured.info != info:
                raise RuntimeError(f"{self.name}: a captured plan changed from {captured.info} to {info}")
            section.plans[kind] = KernelPlan(kernel, workspace, info)


def count_sms(device: torch.device) -> int:
    """Return the number of multiprocessors that FlashInfer's scheduler spreads work over."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1

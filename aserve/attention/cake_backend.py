"""This project's own kernels for decodes; nothing is planned on the host, shares of work are dealt on the device."""

import logging
from dataclasses import dataclass

import torch
from torch import Tensor

from aserve.attention.base import (
    AttentionBackend,
    AttentionBatch,
    AttentionKind,
    AttentionProblem,
    AttentionSpec,
    CaptureShape,
    LayerKV,
    LseBase,
    Phase,
    StepTables,
    refuse_device,
)
from aserve.attention.cake_blackwell import CAPABILITIES, CakeBlackwellBackend
from aserve.attention.cake_choice import choose_decodes, refuse_decodes
from aserve.attention.installed import cake_fmha_refusal
from aserve.kernels.cake.architectures import refuse_architecture
from aserve.kernels.cake.attention_call import MAX_PAGE_SIZE, AttentionCall, KVPages, PagedBatch, ScoreRules
from aserve.kernels.cake.decode_schedule import DecodeSchedule, fill_schedule
from aserve.kernels.cake.plain_decode import run_plain_decode
from aserve.kernels.cake.split_decode import PartialResults, run_split_decode
from aserve.kernels.cake.split_launch import SplitLaunch

logger = logging.getLogger(__name__)

MIN_CAPABILITY = (8, 0)
NUM_CPU_PROGRAMS = 6  # under Triton's interpreter, where they run one after another


@dataclass(frozen=True, slots=True)
class CakePlan:
    """A step's decodes, and how each kind of layers that splits keys is launched and shares them out."""

    batch: PagedBatch
    launches: dict[AttentionKind, SplitLaunch]  # of the kinds of layers that split keys
    schedules: dict[AttentionKind, DecodeSchedule]
    is_captured: bool  # with tables that each replay finds rewritten


class CakeBackend(AttentionBackend):
    """Reads pools of any page size and order, of the queries' dtype or of e4m3; decodes only."""

    name = "cake"
    lse_base: LseBase = "e"
    reads_any_order = True

    def __init__(
        self, problem: AttentionProblem, device: torch.device, phases: tuple[Phase, ...] = ("decode",)
    ) -> None:
        super().__init__(problem, device, phases)
        self._launches = {kind: _choose_launches(problem, kind) for kind in problem.kinds}
        self._partials = self._allocate_partials()
        self._rows = torch.arange(problem.max_num_seqs, dtype=torch.int32, device=device)
        self._num_captured_bytes = 0

    @classmethod
    def implementation(cls, problem: AttentionProblem) -> type[AttentionBackend]:
        """Return FlashInfer's family where there is one that serves the decodes; pinned variants are of this one."""
        if problem.capability not in CAPABILITIES or problem.cake_variants or cake_fmha_refusal():
            return cls
        return cls if CakeBlackwellBackend.refuse(problem, "decode") else CakeBlackwellBackend

    @classmethod
    def refuse(cls, problem: AttentionProblem, phase: Phase) -> str | None:
        if reason := refuse_device(problem, MIN_CAPABILITY):
            return reason
        if phase == "prefill":
            return "it has kernels for decodes only"
        if problem.page_size > MAX_PAGE_SIZE:
            return f"it knows page_size up to {MAX_PAGE_SIZE}, not {problem.page_size}"
        return refuse_architecture(problem.capability) or refuse_decodes(problem)

    @property
    def workspace_bytes(self) -> int:
        return self._partials.num_bytes + 4 * len(self._rows) + self._num_captured_bytes

    def plan(self, batch: AttentionBatch) -> CakePlan:
        num_seqs = len(batch.key_lens)
        if batch.num_decodes != num_seqs:
            raise ValueError(f"{self.name}: it plans decodes only, not {num_seqs - batch.num_decodes} chunks")
        rows = self._rows[:num_seqs]
        decodes = PagedBatch(batch.page_table, rows, batch.key_lens_device, batch.page_size)
        plan = self._make_plan(decodes, is_captured=False)
        self._share_out(plan)
        return plan

    def forward(
        self,
        q: Tensor,
        layer_kv: LayerKV,
        plan: CakePlan,
        spec: AttentionSpec,
        *,
        return_lse: bool = False,
        out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        out = q.new_empty(q.shape) if out is None else out
        lse = q.new_empty(q.shape[:2], dtype=torch.float32) if return_lse else None
        decodes = slice(0, len(plan.batch.rows))
        call = AttentionCall(
            q=q[decodes],
            out=out[decodes],
            lse=None if lse is None else lse[decodes],
            pages=KVPages(layer_kv.key, layer_kv.value, layer_kv.key_scale, layer_kv.value_scale),
            batch=plan.batch,
            rules=ScoreRules(spec.scale, spec.sliding_window, spec.softcap, spec.sinks),
        )
        call.check()
        launch = plan.launches.get(spec.kind)
        if launch is None:
            run_plain_decode(call)
        else:
            run_split_decode(call, launch, plan.schedules[spec.kind], self._partials)
        return out, lse

    @property
    def captures_decodes(self) -> bool:
        return True

    def prepare_capture(self, shape: CaptureShape, tables: StepTables) -> CakePlan:
        if shape.num_chunks:
            raise ValueError(f"{self.name}: only batches of decodes are captured")
        rows, key_lens = tables.rows[: shape.num_decodes], tables.key_lens[: shape.num_decodes]
        plan = self._make_plan(PagedBatch(tables.page_table, rows, key_lens, tables.page_size), is_captured=True)
        self._num_captured_bytes += sum(schedule.num_bytes for schedule in plan.schedules.values())
        return plan

    def convert(self, plan: CakePlan) -> None:
        if plan.is_captured:
            self._share_out(plan)

    def _share_out(self, plan: CakePlan) -> None:
        for kind, schedule in plan.schedules.items():
            launch = plan.launches[kind]
            fill_schedule(
                schedule,
                plan.batch.key_lens,
                window=kind.sliding_window,
                num_kv_heads=kind.num_kv_heads,
                block_len=launch.block_len,
                min_units=launch.min_units,
            )

    def _make_plan(self, batch: PagedBatch, *, is_captured: bool) -> CakePlan:
        """Choose a launch for each kind by the number of sequences, with room for its schedule."""
        num_seqs = len(batch.key_lens)
        launches = {
            kind: launch
            for kind, steps in self._launches.items()
            if (launch := next((launch for limit, launch in steps if num_seqs <= limit), steps[-1][1])) is not None
        }
        schedules = {
            kind: DecodeSchedule.allocate(num_seqs, self._count_programs(launch), self.device)
            for kind, launch in launches.items()
        }
        return CakePlan(batch, launches, schedules, is_captured)

    def _allocate_partials(self) -> PartialResults:
        """Return room for whatever step and kind leaves the most rows, and the most elements."""
        sizes = [(0, 0)] + [
            (num_rows := self._count_programs(launch) * (kind.num_heads // kind.num_kv_heads), num_rows * kind.head_dim)
            for kind, steps in self._launches.items()
            for _, launch in steps
            if launch is not None
        ]
        num_rows, num_elements = (max(counts) for counts in zip(*sizes, strict=True))
        return PartialResults.allocate(num_rows, 1, -(-num_elements // max(num_rows, 1)), self.device)

    def _count_programs(self, launch: SplitLaunch) -> int:
        """Return how many share a step."""
        if self.device.type != "cuda":
            return NUM_CPU_PROGRAMS
        num_sms: int = torch.cuda.get_device_properties(self.device).multi_processor_count
        return num_sms * launch.programs_per_sm


def _choose_launches(problem: AttentionProblem, kind: AttentionKind) -> list[tuple[int, SplitLaunch | None]]:
    """Return the launch of each choice, None for the plain kernel, after the most sequences that it is for."""
    launches = []
    for step in choose_decodes(problem, kind):
        if step.choice.variant is None:
            raise ValueError(f"cake: no variant serves {kind}: {step.choice.refusals}")
        logger.info("cake: %s", step.describe(kind))
        launches.append((step.max_seqs, step.choice.variant.launch))
    return launches

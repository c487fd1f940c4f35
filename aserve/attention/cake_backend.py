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
from aserve.kernels.cake.attention_call import MAX_PAGE_SIZE, AttentionCall, KVPages, PagedBatch, ScoreRules
from aserve.kernels.cake.decode_schedule import DecodeSchedule, fill_schedule
from aserve.kernels.cake.decode_variants import DECODE_VARIANTS, DecodeVariant
from aserve.kernels.cake.plain_decode import run_plain_decode
from aserve.kernels.cake.select_variant import VariantProblem, select_variant
from aserve.kernels.cake.split_decode import PartialResults, run_split_decode

logger = logging.getLogger(__name__)

MIN_CAPABILITY = (8, 0)
NUM_CPU_PROGRAMS = 6  # under Triton's interpreter, where they run one after another


@dataclass(frozen=True, slots=True)
class CakePlan:
    """A step's decodes, and how each kind of layers that splits keys shares them out."""

    batch: PagedBatch
    schedules: dict[AttentionKind, DecodeSchedule]
    is_captured: bool  # with tables that each replay finds rewritten


class CakeBackend(AttentionBackend):
    """Reads pools of any page size and order, of the queries' dtype or of e4m3; decodes only."""

    name = "cake"
    lse_base: LseBase = "e"

    def __init__(
        self, problem: AttentionProblem, device: torch.device, phases: tuple[Phase, ...] = ("decode",)
    ) -> None:
        super().__init__(problem, device, phases)
        self._variants = {kind: _choose(problem, kind) for kind in problem.kinds}
        self._partials = self._allocate_partials()
        self._rows = torch.arange(problem.max_num_seqs, dtype=torch.int32, device=device)
        self._num_captured_bytes = 0

    @classmethod
    def refuse(cls, problem: AttentionProblem, phase: Phase) -> str | None:
        if reason := refuse_device(problem, MIN_CAPABILITY):
            return reason
        if phase == "prefill":
            return "it has kernels for decodes only"
        if problem.page_size > MAX_PAGE_SIZE:
            return f"it knows page_size up to {MAX_PAGE_SIZE}, not {problem.page_size}"
        for kind in problem.kinds:
            choice = select_variant(_variant_problem(problem, kind), DECODE_VARIANTS)
            if choice.variant is None:
                return list(choice.refusals.values())[-1]  # of the one that serves most
        return None

    @property
    def workspace_bytes(self) -> int:
        return self._partials.num_bytes + 4 * len(self._rows) + self._num_captured_bytes

    def plan(self, batch: AttentionBatch) -> CakePlan:
        num_seqs = len(batch.key_lens)
        if batch.num_decodes != num_seqs:
            raise ValueError(f"{self.name}: it plans decodes only, not {num_seqs - batch.num_decodes} chunks")
        rows = self._rows[:num_seqs]
        decodes = PagedBatch(batch.page_table, rows, batch.key_lens_device, batch.page_size)
        plan = CakePlan(decodes, self._allocate_schedules(num_seqs), is_captured=False)
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
        launch = self._variants[spec.kind].launch
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
        schedules = self._allocate_schedules(shape.num_decodes)
        self._num_captured_bytes += sum(schedule.num_bytes for schedule in schedules.values())
        decodes = PagedBatch(tables.page_table, tables.rows, tables.key_lens, tables.page_size)
        return CakePlan(decodes, schedules, is_captured=True)

    def convert(self, plan: CakePlan) -> None:
        if plan.is_captured:
            self._share_out(plan)

    def _share_out(self, plan: CakePlan) -> None:
        for kind, schedule in plan.schedules.items():
            launch = self._variants[kind].launch
            if launch is not None:
                fill_schedule(
                    schedule,
                    plan.batch.key_lens,
                    window=kind.sliding_window,
                    num_kv_heads=kind.num_kv_heads,
                    block_len=launch.block_len,
                )

    def _allocate_schedules(self, num_seqs: int) -> dict[AttentionKind, DecodeSchedule]:
        return {
            kind: DecodeSchedule.allocate(num_seqs, num_programs, self.device)
            for kind, variant in self._variants.items()
            if (num_programs := self._count_programs(variant))
        }

    def _allocate_partials(self) -> PartialResults:
        """Return room for the kind whose partial results take most."""
        sizes = [
            (self._count_programs(variant), kind.num_heads // kind.num_kv_heads, kind.head_dim)
            for kind, variant in self._variants.items()
        ]
        num_programs, group, head_dim = max(sizes, key=lambda size: size[0] * size[1] * size[2])
        return PartialResults.allocate(num_programs, group, head_dim, self.device)

    def _count_programs(self, variant: DecodeVariant) -> int:
        """Return how many share a step of the variant, 0 for the plain kernel."""
        if variant.launch is None:
            return 0
        if self.device.type != "cuda":
            return NUM_CPU_PROGRAMS
        num_sms: int = torch.cuda.get_device_properties(self.device).multi_processor_count
        return num_sms * variant.launch.programs_per_sm


def _variant_problem(problem: AttentionProblem, kind: AttentionKind) -> VariantProblem:
    """Every layer may be asked for its log-sum-exp."""
    group = kind.num_heads // kind.num_kv_heads
    return VariantProblem(problem.dtype, problem.kv_dtype, kind.head_dim, group, problem.capability, return_lse=True)


def _choose(problem: AttentionProblem, kind: AttentionKind) -> DecodeVariant:
    choice = select_variant(_variant_problem(problem, kind), DECODE_VARIANTS)
    if choice.variant is None:
        raise ValueError(f"cake: no variant serves {kind}: {choice.refusals}")
    passed_over = "; ".join(f"{name}: {reason}" for name, reason in choice.refusals.items())
    logger.info("cake: %s for head_dim %d (%s)", choice.variant.name, kind.head_dim, passed_over or "the first row")
    return choice.variant

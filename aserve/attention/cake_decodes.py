"""Decodes and short chunks on the cake family: which launch splits their keys, and how the work is shared out."""

import logging
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from aserve.attention.base import AttentionKind, AttentionProblem
from aserve.attention.cake_choice import choose_decodes, choose_several, describe_choice, num_draft_queries
from aserve.kernels.cake.architectures import SHARED_BYTES
from aserve.kernels.cake.attention_call import AttentionCall, PagedBatch
from aserve.kernels.cake.decode_schedule import DecodeSchedule, fill_schedule
from aserve.kernels.cake.decode_variants import DecodeVariant
from aserve.kernels.cake.plain_decode import run_plain_decode
from aserve.kernels.cake.split_decode import PartialResults, run_split_decode
from aserve.kernels.cake.split_launch import SplitLaunch
from aserve.kernels.nvfp4 import element_bytes

logger = logging.getLogger(__name__)

NUM_CPU_PROGRAMS = 6  # under Triton's interpreter, where they run one after another


Variants = dict[AttentionKind, list[tuple[int, DecodeVariant]]]  # after the most sequences that each is for


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """A step's sequences, what serves each kind of layers, and how keys are shared out."""

    batch: PagedBatch
    variants: dict[AttentionKind, DecodeVariant]
    schedules: dict[AttentionKind, DecodeSchedule]  # of the kinds of layers that split keys


class Decodes(Protocol):
    """What the backend asks of those who serve its decodes; a plan is passed to the one that made it."""

    def plan(self, batch: PagedBatch) -> Any:
        """Return a plan for as many sequences as ``batch`` has; enqueues nothing that a graph would have to hold."""

    def share_out(self, plan: Any) -> None:
        """Enqueue what each step does once for all layers."""

    def attend(self, call: AttentionCall, plan: Any, kind: AttentionKind) -> None:
        """Enqueue one layer's kernels."""

    def kernel_name(self, plan: Any, kind: AttentionKind) -> str:
        """Name the kernel that serves layers of a kind."""


class CakeDecodes:
    """Plans and runs decodes, or chunks of up to ``max_queries`` queries, for the kinds that ``variants`` has."""

    def __init__(
        self, variants: Variants, problem: AttentionProblem, device: torch.device, max_queries: int = 1
    ) -> None:
        self._variants = variants
        self._problem = problem
        self._device = device
        self._max_queries = max_queries
        self._partials = self._allocate_partials()

    @classmethod
    def for_decodes(cls, problem: AttentionProblem, device: torch.device) -> "CakeDecodes":
        """Choose for all kinds of ``problem``."""
        return cls({kind: _choose_variants(problem, kind) for kind in problem.kinds}, problem, device)

    @classmethod
    def for_drafts(cls, problem: AttentionProblem, device: torch.device) -> "CakeDecodes":
        """Choose for the kinds that have a variant for the few queries of a sequence whose drafts are verified."""
        variants: Variants = {}
        for kind in problem.kinds:
            choice = choose_several(problem, kind)
            logger.info("cake: %s", describe_choice(choice, f"drafts, head_dim {kind.head_dim}"))
            if choice.variant is not None:
                variants[kind] = [(problem.max_num_seqs, choice.variant)]
        return cls(variants, problem, device, num_draft_queries(problem))

    def max_query_len(self, kind: AttentionKind) -> int:
        """Return the queries of a sequence that are served, 0 if none are."""
        return self._max_queries if kind in self._variants else 0

    def plan(self, batch: PagedBatch) -> DecodePlan:
        """Choose a variant for each kind by the number of sequences, with room for its schedule."""
        num_seqs = len(batch.key_lens)
        variants = {
            kind: next((variant for limit, variant in steps if num_seqs <= limit), steps[-1][1])
            for kind, steps in self._variants.items()
        }
        schedules = {
            kind: DecodeSchedule.allocate(
                num_seqs, self._count_programs(variant.launch, kind), self._device, self._max_queries
            )
            for kind, variant in variants.items()
            if variant.launch is not None
        }
        return DecodePlan(batch, variants, schedules)

    def share_out(self, plan: DecodePlan) -> None:
        """Enqueue what deals the step's keys out to programs."""
        for kind, schedule in plan.schedules.items():
            launch = plan.variants[kind].launch
            if launch is not None:
                fill_schedule(schedule, plan.batch, launch, window=kind.sliding_window, num_kv_heads=kind.num_kv_heads)

    def attend(self, call: AttentionCall, plan: DecodePlan, kind: AttentionKind) -> None:
        """Enqueue one layer's kernels."""
        plan.variants[kind].check(call)
        launch = plan.variants[kind].launch
        if launch is None:
            run_plain_decode(call)
        else:
            run_split_decode(call, launch, plan.schedules[kind], self._partials)

    def kernel_name(self, plan: DecodePlan, kind: AttentionKind) -> str:
        """Return the name of the row that serves layers of ``kind``."""
        return plan.variants[kind].name

    def _allocate_partials(self) -> PartialResults:
        """Return room for whatever step and kind leaves the most rows, and the most elements."""
        num_rows, num_elements = 0, 0
        for kind, steps in self._variants.items():
            for launch in (variant.launch for _, variant in steps if variant.launch is not None):
                rows = self._count_programs(launch, kind) * self._count_rows(kind)
                num_rows, num_elements = max(num_rows, rows), max(num_elements, rows * kind.head_dim)
        return PartialResults.allocate(num_rows, 1, -(-num_elements // max(num_rows, 1)), self._device)

    def _count_programs(self, launch: SplitLaunch, kind: AttentionKind) -> int:
        """Return how many share a step."""
        if self._device.type != "cuda":
            return NUM_CPU_PROGRAMS
        kv_bytes, given = element_bytes(self._problem.kv_dtype), SHARED_BYTES[self._problem.capability]
        num_sms: int = torch.cuda.get_device_properties(self._device).multi_processor_count
        return num_sms * launch.count_programs(kind.head_dim, self._count_rows(kind), kv_bytes, given)

    def _count_rows(self, kind: AttentionKind) -> int:
        """Return the queries times heads of a program."""
        return self._max_queries * (kind.num_heads // kind.num_kv_heads)


def _choose_variants(problem: AttentionProblem, kind: AttentionKind) -> list[tuple[int, DecodeVariant]]:
    """Return the variant of each choice after the most sequences that it is for."""
    variants = []
    for step in choose_decodes(problem, kind):
        if step.choice.variant is None:
            raise ValueError(f"cake: no variant serves {kind}: {step.choice.refusals}")
        logger.info("cake: %s", step.describe(kind))
        variants.append((step.max_seqs, step.choice.variant))
    return variants

"""The decodes of a step on the cake family: which launch splits their keys, and how the work is shared out."""

import logging
from dataclasses import dataclass

import torch

from aserve.attention.base import AttentionKind, AttentionProblem
from aserve.attention.cake_choice import choose_decodes
from aserve.kernels.cake.attention_call import AttentionCall, PagedBatch
from aserve.kernels.cake.decode_schedule import DecodeSchedule, fill_schedule
from aserve.kernels.cake.plain_decode import run_plain_decode
from aserve.kernels.cake.split_decode import PartialResults, run_split_decode
from aserve.kernels.cake.split_launch import SplitLaunch

logger = logging.getLogger(__name__)

NUM_CPU_PROGRAMS = 6  # under Triton's interpreter, where they run one after another


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """A step's decodes, and how each kind of layers that splits keys is launched and shares them out."""

    batch: PagedBatch
    launches: dict[AttentionKind, SplitLaunch]  # of the kinds of layers that split keys
    schedules: dict[AttentionKind, DecodeSchedule]

    @property
    def num_bytes(self) -> int:
        """Memory taken."""
        return sum(schedule.num_bytes for schedule in self.schedules.values())


class CakeDecodes:
    """Plans and runs decodes for all kinds of a problem's layers."""

    def __init__(self, problem: AttentionProblem, device: torch.device) -> None:
        self._device = device
        self._launches = {kind: _choose_launches(problem, kind) for kind in problem.kinds}
        self._partials = self._allocate_partials()

    @property
    def num_bytes(self) -> int:
        """Memory taken by what all plans share."""
        return self._partials.num_bytes

    def plan(self, batch: PagedBatch) -> DecodePlan:
        """Choose a launch for each kind by the number of sequences, with room for its schedule."""
        num_seqs = len(batch.key_lens)
        launches = {
            kind: launch
            for kind, steps in self._launches.items()
            if (launch := next((launch for limit, launch in steps if num_seqs <= limit), steps[-1][1])) is not None
        }
        schedules = {
            kind: DecodeSchedule.allocate(num_seqs, self._count_programs(launch), self._device)
            for kind, launch in launches.items()
        }
        return DecodePlan(batch, launches, schedules)

    def share_out(self, plan: DecodePlan) -> None:
        """Enqueue what deals the step's keys out to programs."""
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

    def attend(self, call: AttentionCall, plan: DecodePlan, kind: AttentionKind) -> None:
        """Enqueue one layer's kernels."""
        launch = plan.launches.get(kind)
        if launch is None:
            run_plain_decode(call)
        else:
            run_split_decode(call, launch, plan.schedules[kind], self._partials)

    def _allocate_partials(self) -> PartialResults:
        """Return room for whatever step and kind leaves the most rows, and the most elements."""
        sizes = [(0, 0)] + [
            (num_rows := self._count_programs(launch) * (kind.num_heads // kind.num_kv_heads), num_rows * kind.head_dim)
            for kind, steps in self._launches.items()
            for _, launch in steps
            if launch is not None
        ]
        num_rows, num_elements = (max(counts) for counts in zip(*sizes, strict=True))
        return PartialResults.allocate(num_rows, 1, -(-num_elements // max(num_rows, 1)), self._device)

    def _count_programs(self, launch: SplitLaunch) -> int:
        """Return how many share a step."""
        if self._device.type != "cuda":
            return NUM_CPU_PROGRAMS
        num_sms: int = torch.cuda.get_device_properties(self._device).multi_processor_count
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

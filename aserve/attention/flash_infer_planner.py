"""Plans the sections of a step for FlashInfer's kernels, in workspaces that all steps share."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from aserve.attention import flash_infer_sizes as sizes
from aserve.attention.base import AttentionKind, AttentionProblem, Phase, StepTables
from aserve.attention.flash_infer_kernels import PagedKernel, PlanRequest, Workspace, splits
from aserve.attention.page_lists import PageLists
from aserve.attention.staging_ring import MIN_BUFFERS, StagingRing

KernelLoader = Callable[[Phase, AttentionKind, AttentionProblem], PagedKernel]


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

    @property
    def is_for_all_lens(self) -> bool:
        """Whether its plans depend on the number of queries alone.

        ``splits_keys`` does not tell: the kernel without tensor cores splits keys as it sees fit.
        """
        return not any(splits(plan.info) for plan in self.plans.values())


class SectionPlanner:
    """Has the kernels, their workspaces and the pinned buffers that plans are written to.

    Partial results share their memory, since kernels run one by one; a plan's integers are a step's own.
    """

    def __init__(
        self,
        problem: AttentionProblem,
        device: torch.device,
        phases: tuple[Phase, ...],
        load: KernelLoader,
        new_ring: Callable[[int, int], StagingRing],
    ) -> None:
        self._kinds = problem.kinds
        self._num_sms = count_sms(device)
        self.kernels = {(phase, kind): load(phase, kind, problem) for kind in problem.kinds for phase in phases}
        num_floats, integers = self._count_bytes(problem)

        def memory(num_bytes: int) -> Tensor:
            return torch.zeros(num_bytes, dtype=torch.uint8, device=device)

        floats = memory(num_floats)
        self.workspaces = {key: Workspace(floats, memory(num_bytes)) for key, num_bytes in integers.items()}
        self._ring = new_ring(MIN_BUFFERS * len(integers), max(integers.values()))

    def _count_bytes(self, problem: AttentionProblem) -> tuple[int, dict[tuple[Phase, AttentionKind], int]]:
        num_floats = 0
        integers: dict[tuple[Phase, AttentionKind], int] = {}
        for phase, kind in self.kernels:
            if phase == "decode":
                num_seqs = num_rows = problem.max_num_seqs
                num_floats = max(num_floats, sizes.decode_float_bytes(kind, num_seqs, self._num_sms))
            else:
                num_seqs = num_rows = problem.max_num_tokens  # a chunk has a token at least
                num_floats = max(num_floats, sizes.chunk_float_bytes(kind, self._num_sms))
            integers[phase, kind] = sizes.integer_bytes(kind, num_seqs, num_rows, self._num_sms)
        return num_floats, integers

    def may_split_decodes(self, num_decodes: int) -> bool:
        """Whether keys may be split. Joining the parts is a kernel of its own, in vain if the batch fills the GPU."""
        return any(num_decodes <= 2 * sizes.max_split_blocks(kind, self._num_sms) for kind in self._kinds)

    def plan(self, section: Section, key_lens: NDArray[np.int32], query_starts: NDArray[np.int32]) -> None:
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
        for kind in self._kinds:
            kernel, workspace = self.kernels[section.phase, kind], self.workspaces[section.phase, kind]
            with self._ring.borrow() as staging:
                if section.is_captured and not section.splits_keys:
                    blocks = sizes.captured_blocks(kind, num_seqs + 1, num_rows, 16, self._num_sms)
                    staging[: 12 * blocks + 48].zero_()  # blocks that the plan leaves out get the empty sequence
                info = kernel.plan(request, workspace, staging)
            captured = section.plans.get(kind)
            if captured is not None and captured.info != info:
                raise RuntimeError(f"fi: a captured plan changed from {captured.info} to {info}")
            section.plans[kind] = KernelPlan(kernel, workspace, info)


def count_sms(device: torch.device) -> int:
    """Return the number of multiprocessors that FlashInfer's scheduler spreads work over."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1

"""What the device knows of every row: its pages and its tokens."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from aserve.attention.base import AttentionBatch
from aserve.distributed.context_shard import ALONE, ContextShard
from aserve.runner.inputs import StepInputs
from aserve.runner.verification import draft_cells
from aserve.sampling.sampler import Upload
from aserve.scheduler.plan import StepPlan


@dataclass(frozen=True, slots=True)
class GatheredStep:
    """The inputs of one step on the device."""

    token_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    slot_mapping: Tensor  # [T] int64: where the tokens' keys and values are written
    batch: AttentionBatch


class DeviceTables:
    """Page table and token pool, with a dummy row at the end whose pages are all the dummy page ``num_pages``.

    A step uploads only what is new. Its input ids come from the pool, where the sampler of the step
    before wrote them.
    """

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_model_len: int,
        page_size: int,
        num_pages: int,
        max_num_tokens: int,
        device: torch.device,
        upload: Upload,
        shard: ContextShard = ALONE,
    ) -> None:
        self._page_size = page_size
        self._num_pages = num_pages
        self._shard = shard
        self._upload = upload
        num_rows, width = max_num_seqs + 1, -(-max_model_len // page_size)
        self.page_table = torch.full((num_rows, width), num_pages, dtype=torch.int32, device=device)
        self.token_pool = torch.zeros((num_rows, max_model_len + 1), dtype=torch.int32, device=device)
        self._prefix_sums_of_decodes = torch.arange(max_num_tokens + 1, dtype=torch.int32, device=device)

    def update(self, plan: StepPlan) -> None:
        """Write the tokens of rows that start, the pages that rows were given and the drafts that they verify."""
        for start in plan.row_starts:
            self.token_pool[start.row, : len(start.token_ids)] = self._upload(np.array(start.token_ids, np.int32))
        if plan.page_updates:
            rows, indices, pages = self._upload(np.array(plan.page_updates, np.int64).T)
            self.page_table[rows, indices] = pages.int()
        if plan.drafts:
            rows, positions, token_ids = self._upload(draft_cells(plan))
            self.token_pool[rows, positions] = token_ids.int()

    def gather(self, inputs: StepInputs, plan: StepPlan) -> GatheredStep:
        """Return what the model and the attention backends read of the step."""
        token_rows, positions = self._upload(inputs.token_rows), self._upload(inputs.positions)
        pages = self.page_table[token_rows, positions // self._page_size].long()
        cu_query_lens, cu_key_lens = self._prefix_sums(inputs, plan)
        width = -(-inputs.max_key_len // self._page_size)
        batch = AttentionBatch(
            query_lens=inputs.query_lens.tolist(),
            key_lens=inputs.key_lens.tolist(),
            num_decodes=plan.num_decodes,
            cu_query_lens=cu_query_lens,
            key_lens_device=self._upload(inputs.key_lens),
            page_table=self.page_table[:, :width].index_select(0, self._upload(inputs.rows)),
            page_size=self._page_size,
            cu_key_lens=cu_key_lens,
        )
        slot_mapping = self._shard.slots(pages, positions, self._page_size, self._num_pages)
        return GatheredStep(self.token_pool[token_rows, positions].long(), positions, slot_mapping, batch)

    def _prefix_sums(self, inputs: StepInputs, plan: StepPlan) -> tuple[Tensor, Tensor]:
        """Upload only what is new: decodes count 0, 1, 2, ...; without earlier keys both sums are one tensor."""
        if inputs.is_fresh:
            cu_key_lens = self._upload(inputs.cu_key_lens)
            return cu_key_lens, cu_key_lens
        if plan.is_decode:
            return self._prefix_sums_of_decodes[: len(inputs.rows) + 1], self._upload(inputs.cu_key_lens)
        return self._upload(inputs.cu_query_lens), self._upload(inputs.cu_key_lens)

    def store_sampled(self, rows: NDArray[np.int64], positions: NDArray[np.int64], token_ids: Tensor) -> None:
        """Write sampled ids [N] where the next step finds them."""
        self.token_pool[self._upload(rows), self._upload(positions)] = token_ids.int()

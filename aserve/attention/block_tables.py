"""For kernels that read a table with a row for each sequence of the step: rows gathered where a graph finds them."""

from dataclasses import dataclass

import torch
from torch import Tensor

from aserve.attention.base import StepTables


@dataclass(frozen=True, slots=True)
class BlockTables:
    """The rows of ``tables`` in the step's order, filled by ``gather``."""

    tables: StepTables
    pages: Tensor  # [N, W] int32

    def gather(self) -> None:
        """Enqueue the copy of the rows."""
        torch.index_select(self.tables.page_table, 0, self.tables.rows, out=self.pages)


class BlockTablePool:
    """Memory for captured tables: the largest first, which smaller ones share, as one step runs at a time."""

    def __init__(self) -> None:
        self._memory: Tensor | None = None

    def take(self, tables: StepTables) -> BlockTables:
        """Return room for the rows of ``tables``."""
        num_seqs, width = len(tables.rows), tables.page_table.shape[1]
        if self._memory is None or self._memory.numel() < num_seqs * width:
            self._memory = tables.page_table.new_zeros(num_seqs * width)
        return BlockTables(tables, self._memory[: num_seqs * width].view(num_seqs, width))

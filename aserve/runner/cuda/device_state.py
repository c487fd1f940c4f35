"""What lives on the device from start to end: the tables, the inputs that graphs read and the results they leave."""

from dataclasses import dataclass

import torch

from aserve.attention.base import CaptureShape, StepTables
from aserve.kernels.gpu.step_inputs import SequenceSpans, TokenInputs
from aserve.runner.cuda.step_arrays import ArrayLayout, Fields


@dataclass(frozen=True, slots=True)
class StateSizes:
    """Capacities."""

    max_num_seqs: int
    max_num_drafts: int  # of one step
    max_model_len: int
    max_num_tokens: int  # of one step
    hidden_size: int
    vocab_size: int
    page_size: int


class DeviceState:
    """Tensors that never move. Row ``max_num_seqs`` of the tables is the dummy row."""

    def __init__(self, sizes: StateSizes, layout: ArrayLayout, dtype: torch.dtype, device: torch.device) -> None:
        num_seqs = sizes.max_num_seqs
        num_rows, width = num_seqs + 1, -(-sizes.max_model_len // sizes.page_size)
        num_sampled = num_seqs + sizes.max_num_drafts
        self._page_size = sizes.page_size
        self._max_num_drafts = sizes.max_num_drafts
        self.page_table = torch.zeros((num_rows, width), dtype=torch.int32, device=device)
        self.token_pool = torch.zeros((num_rows, sizes.max_model_len + 1), dtype=torch.int32, device=device)
        self.words = torch.zeros(layout.num_words, dtype=torch.int32, device=device)
        self.arrays: Fields = layout.device_views(self.words)
        tokens = torch.zeros((3, sizes.max_num_tokens), dtype=torch.int64, device=device)
        self._tokens = TokenInputs(*tokens)
        self.hidden = torch.zeros((sizes.max_num_tokens, sizes.hidden_size), dtype=dtype, device=device)
        self.sampled_hidden = torch.zeros((num_sampled, sizes.hidden_size), dtype=dtype, device=device)
        self.logits = torch.zeros((num_sampled, sizes.vocab_size), dtype=torch.float32, device=device)
        self.token_ids = torch.zeros(num_sampled, dtype=torch.int32, device=device)

    def point_at(self, dummy_page: int) -> None:
        """Let every row, the dummy row above all, stand on the dummy page of a new pool."""
        self.page_table.fill_(dummy_page)

    def num_sampled(self, shape: CaptureShape) -> int:
        """Return how many samples a step of ``shape`` may have; only chunks verify drafts."""
        num_drafts = self._max_num_drafts if shape.num_chunks else 0
        return min(shape.num_tokens, shape.num_decodes + shape.num_chunks + num_drafts, len(self.sampled_hidden))

    def spans(self, shape: CaptureShape) -> SequenceSpans:
        """Return the sequences of a step of ``shape``, and its padding."""
        arrays, num_seqs = self.arrays, shape.num_decodes + shape.num_chunks
        return SequenceSpans(
            arrays.rows[: num_seqs + 1],
            arrays.query_starts[: num_seqs + 1],
            arrays.query_lens[: num_seqs + 1],
            arrays.key_lens[:num_seqs],
        )

    def tokens(self, num_tokens: int) -> TokenInputs:
        """Return the inputs of a step's tokens."""
        tokens = self._tokens
        return TokenInputs(
            tokens.token_ids[:num_tokens], tokens.positions[:num_tokens], tokens.slot_mapping[:num_tokens]
        )

    def tables(self, shape: CaptureShape) -> StepTables:
        """Return what captured attention reads."""
        arrays, num_seqs = self.arrays, shape.num_decodes + shape.num_chunks
        return StepTables(
            page_table=self.page_table,
            rows=arrays.rows[:num_seqs],
            key_lens=arrays.key_lens[:num_seqs],
            cu_query_lens=arrays.cu_chunk_lens[: shape.num_chunks + 1],
            page_size=self._page_size,
        )

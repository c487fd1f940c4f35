"""From the hidden states of the sampled rows to logits, and on to tokens where all rows want a plain draw."""

from dataclasses import dataclass
from typing import Any

import torch

from aserve.models.decoder import Decoder
from aserve.runner.cuda.device_state import DeviceState
from aserve.sampling.gpu.token_picker import PoolTarget, TokenPicker


@dataclass(frozen=True, slots=True)
class CapturedHead:
    """Two graphs for one number of rows: with sampling inside, and with the logits left to the caller."""

    sampling: torch.cuda.CUDAGraph
    scoring: torch.cuda.CUDAGraph


class Head:
    """Reads ``state.sampled_hidden``; sampled tokens go to ``state.token_ids`` and into the token pool."""

    def __init__(self, model: Decoder, state: DeviceState, picker: TokenPicker) -> None:
        self._model = model
        self._state = state
        self._picker = picker

    def capture(self, size: int, pool: Any) -> CapturedHead:
        """Capture both graphs for ``size`` rows on the current stream."""
        self.score_and_sample(size)  # compiles and loads what is new, which a capture cannot
        sampling, scoring = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        stream = torch.cuda.current_stream()
        with torch.cuda.graph(sampling, pool=pool, stream=stream, capture_error_mode="thread_local"):
            self.score_and_sample(size)
        with torch.cuda.graph(scoring, pool=pool, stream=stream, capture_error_mode="thread_local"):
            self.score(size)
        return CapturedHead(sampling, scoring)

    def score(self, size: int) -> None:
        """Enqueue the logits of the first ``size`` sampled rows, into ``state.logits``."""
        self._model.compute_logits(self._state.sampled_hidden[:size], out=self._state.logits[:size])

    def score_and_sample(self, size: int) -> None:
        """Enqueue plain draws from these logits too."""
        self.score(size)
        state, arrays = self._state, self._state.arrays
        self._picker.pick_plain(
            state.logits[:size],
            arrays.uniforms[:size],
            arrays.temperatures[:size],
            state.token_ids[:size],
            PoolTarget(state.token_pool, arrays.sampled_rows[:size], arrays.sampled_positions[:size]),
        )

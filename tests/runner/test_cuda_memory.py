"""What a step may allocate while requests wait is kept free at start: measured here as bytes that live at once."""

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from aserve.request import SamplingParams
from aserve.runner.cuda.build import FULL_SAMPLING_COPIES, sampling_bytes
from aserve.runner.prompt_scores import MAX_LOGIT_ROWS, PromptScores
from aserve.sampling.sampler import Sampler
from aserve.scheduler.plan import RowStart, StepPlan

ROWS, VOCAB_SIZE = 16, 20_000
CPU = torch.device("cpu")


class LiveBytes(TorchDispatchMode):
    """Counts the storages that operators return, and the most that lived at once."""

    def __init__(self, *known: Tensor) -> None:
        super().__init__()
        self._known = {tensor.untyped_storage()._cdata for tensor in known}
        self._live = self.peak = 0

    def __torch_dispatch__(
        self,
        operator: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = operator(*args, **kwargs or {})
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, Tensor):
                self._count(tensor.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, num_bytes = storage._cdata, storage.nbytes()
        if key in self._known:
            return
        self._known.add(key)
        self._live += num_bytes
        self.peak = max(self.peak, self._live)
        weakref.finalize(storage, self._forget, key, num_bytes)

    def _forget(self, key: int, num_bytes: int) -> None:
        self._known.remove(key)
        self._live -= num_bytes


class PlayedPicker:
    """Takes what a GPU's picker takes, which allocates nothing."""

    def pick_plain(self, logits: Tensor, uniforms: Tensor, temperatures: Tensor, token_ids: Tensor) -> None:
        token_ids.zero_()


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.1, logprobs=20),
        SamplingParams(logit_bias={5: 1.0}, min_tokens=4, logprobs=0),
    ],
)
def test_sampling_of_any_rows_stays_within_what_is_reserved(params: SamplingParams) -> None:
    def upload(array: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).clone()

    sampler = Sampler(ROWS, VOCAB_SIZE, frozenset({2}), CPU, upload, PlayedPicker())  # type: ignore[arg-type]
    sampler.reserve()
    for row in range(ROWS):
        sampler.start_row(RowStart(row, [1, 2], 2, 0, params))
    logits = torch.randn(ROWS, VOCAB_SIZE)
    with torch.inference_mode(), LiveBytes(logits) as live:
        sampler.sample(logits, np.arange(ROWS), np.full(ROWS, 3))
    assert logits.nbytes < live.peak <= FULL_SAMPLING_COPIES * logits.nbytes <= sampling_bytes(ROWS, VOCAB_SIZE)


def test_scores_of_prompts_stay_within_what_is_reserved_for_few_sequences() -> None:
    class PlayedModel:
        def compute_logits(self, hidden: Tensor) -> Tensor:
            return hidden.new_ones(len(hidden), VOCAB_SIZE)

    pool = torch.zeros(2, 1000, dtype=torch.int32)
    scores = PromptScores(PlayedModel(), pool)  # type: ignore[arg-type]
    scores.start_row(RowStart(0, [1] * 900, 900, 0, SamplingParams(prompt_logprobs=5)))
    hidden = torch.randn(900, 8)
    with torch.inference_mode(), LiveBytes(hidden, pool) as live:
        scores.score(StepPlan(1, [0], [0], [900], [True]), hidden)
    assert MAX_LOGIT_ROWS * VOCAB_SIZE * 4 < live.peak <= sampling_bytes(1, VOCAB_SIZE)

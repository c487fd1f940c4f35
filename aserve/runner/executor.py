"""One step from plan to sampled tokens, on one device and one thread; knows nothing of launching or futures."""

import time
from collections.abc import Set
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from aserve.attention.base import AttentionBackend, LayerKV
from aserve.attention.context import ForwardContext
from aserve.distributed.context_shard import ALONE, ContextShard
from aserve.distributed.group import RankGroup
from aserve.kernels.operators import Operators
from aserve.models.decoder import Decoder
from aserve.runner.inputs import InputBuffers, StepInputs
from aserve.runner.prompt_scores import ChunkScores, PromptScores
from aserve.runner.tables import DeviceTables
from aserve.runner.transfer import Transfer
from aserve.runner.verification import as_decodes
from aserve.sampling.sampler import SampledTokens, Sampler
from aserve.scheduler.plan import StepPlan, StepTokens
from aserve.structured.compile import GrammarCompiler


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceParts:
    """What a step runs on; sized for ``max_num_seqs`` rows and ``num_pages`` pages beside the dummy ones."""

    model: Decoder
    backend: AttentionBackend
    operators: Operators
    layers_kv: list[LayerKV]
    device: torch.device
    max_num_seqs: int
    max_model_len: int
    max_num_tokens: int  # of one step
    num_pages: int
    page_size: int  # of the scheduler: tokens that all ranks keep together
    group: RankGroup | None = None  # the ranks that share the tokens; None = there is but one

    @property
    def shard(self) -> ContextShard:
        """Which tokens this rank keeps."""
        return ALONE if self.group is None else self.group.shard


class StepExecutor:
    """Owns the tables and the sampler; all calls come from one thread, one step after the other."""

    def __init__(self, parts: DeviceParts, eos_token_ids: Set[int], compiler: GrammarCompiler | None = None) -> None:
        vocab_size = parts.model.config.vocab_size
        self._parts = parts
        self._transfer = Transfer(parts.device)
        self._tables = DeviceTables(
            max_num_seqs=parts.max_num_seqs,
            max_model_len=parts.max_model_len,
            page_size=parts.page_size,
            num_pages=parts.num_pages,
            max_num_tokens=parts.max_num_tokens,
            device=parts.device,
            upload=self._transfer.upload,
            shard=parts.shard,
        )
        self._buffers = InputBuffers(parts.max_num_tokens, parts.max_num_tokens)  # no row without a token
        self._sampler = Sampler(
            parts.max_num_seqs + 1,
            vocab_size,
            eos_token_ids,
            parts.device,
            self._transfer.upload,
            compiler=compiler,
        )
        self._prompt_scores = PromptScores(parts.model, self._tables.token_pool)

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepTokens:
        """Run ``plan`` and bring its tokens to the host."""
        started_at_s = time.perf_counter()
        self._update(plan)
        tokens = self._run(plan) if plan.rows else StepTokens(plan.step_id, [])
        tokens.step_time_s = time.perf_counter() - started_at_s
        return tokens

    def _update(self, plan: StepPlan) -> None:
        self._tables.update(plan)
        for start in plan.row_starts:
            self._sampler.start_row(start)
            self._prompt_scores.start_row(start)

    def _run(self, plan: StepPlan) -> StepTokens:
        step = as_decodes(plan)
        inputs = self._buffers.fill(step)
        hidden = self._forward(step, inputs)
        scores = self._prompt_scores.score(plan, hidden)
        sampled = self._sample(inputs, hidden) if inputs.sampled_seqs.size else None
        return self._read_back(plan.step_id, sampled, scores)

    def _forward(self, plan: StepPlan, inputs: StepInputs) -> Tensor:
        parts = self._parts
        step = self._tables.gather(inputs, plan)
        ctx = ForwardContext(
            positions=step.positions,
            slot_mapping=step.slot_mapping,
            backend=parts.backend,
            plan=parts.backend.plan(step.batch),
            layers_kv=parts.layers_kv,
            operators=parts.operators,
        )
        return parts.model.forward(step.token_ids, ctx)

    def _sample(self, inputs: StepInputs, hidden: Tensor) -> SampledTokens:
        rows = inputs.rows[inputs.sampled_seqs].astype(np.int64)
        positions = inputs.key_lens[inputs.sampled_seqs].astype(np.int64)
        logits = self._parts.model.compute_logits(hidden[self._transfer.upload(inputs.sampled_tokens)])
        sampled = self._sampler.sample(logits, rows, positions)
        self._tables.store_sampled(rows, positions, sampled.token_ids)
        return sampled

    def _read_back(self, step_id: int, sampled: SampledTokens | None, scores: list[ChunkScores]) -> StepTokens:
        """Wait for the device, once, and list what it found."""
        groups = self._transfer.read_back([sampled.tensors() if sampled else (), *(chunk.tensors for chunk in scores)])
        tokens = sampled.report(step_id, groups[0]) if sampled else StepTokens(step_id, [])
        if scores:
            tokens.prompt_logprobs = {
                chunk.place: chunk.report(group) for chunk, group in zip(scores, groups[1:], strict=True)
            }
        return tokens

"""The runner of a CUDA device: the event loop's thread enqueues a step and returns; two streams do the rest.

    upload stream    the step's inputs, in one copy from pinned memory
    compute stream   tables, forward, sampling, as replays of captured graphs; tokens back to pinned memory

Step N+1 finds its input ids where step N's sampling wrote them, so it never waits for the host.
"""

import logging
from concurrent.futures import Future

import numpy as np
import torch

from aserve.errors import EngineDeadError
from aserve.kernels.gpu.compile_count import CompileCounter
from aserve.runner.base import ModelRunner
from aserve.runner.cuda.body import Body
from aserve.runner.cuda.device_state import DeviceState
from aserve.runner.cuda.graphs import Graphs
from aserve.runner.cuda.head import CapturedHead, Head
from aserve.runner.cuda.results import Download, Downloads
from aserve.runner.cuda.sizes import exact_shape, warm_up_sizes
from aserve.runner.cuda.staging import StagedStep, Staging
from aserve.runner.cuda.waiter import PendingStep, Waiter
from aserve.runner.prompt_scores import ChunkScores, PromptScores
from aserve.runner.warm_up import warm_up_plans
from aserve.sampling.sampler import Sampler, Upload
from aserve.scheduler.limits import Limits
from aserve.scheduler.plan import StepPlan, StepTokens

logger = logging.getLogger(__name__)


class CudaRunner(ModelRunner):
    """Calls come from one thread at a time: that of the start, then the event loop's."""

    def __init__(
        self,
        limits: Limits,
        *,
        state: DeviceState,
        staging: Staging,
        body: Body,
        head: Head,
        graphs: Graphs,
        sampler: Sampler,
        prompt_scores: PromptScores,
        upload: Upload,
        compute: torch.cuda.Stream,
    ) -> None:
        self._limits = limits
        self._state = state
        self._staging = staging
        self._body = body
        self._head = head
        self._graphs = graphs
        self._sampler = sampler
        self._prompt_scores = prompt_scores
        self._upload = upload
        self._compute = compute
        self._downloads = Downloads(len(state.token_ids), compute)
        self._newest = torch.cuda.Event()  # end of the newest step on the device
        self._num_idle_launches = 0
        self._compilations = CompileCounter()
        self._waiter: Waiter | None = Waiter()

    @property
    def limits(self) -> Limits:
        return self._limits

    def launch(self, plan: StepPlan) -> "Future[StepTokens]":
        """Enqueue ``plan``. Raises EngineDeadError once closed, and what CUDA reports while enqueuing."""
        if self._waiter is None:
            raise EngineDeadError("the runner is closed")
        future: Future[StepTokens] = Future()
        current = torch.cuda.current_stream()
        torch.cuda.set_stream(self._compute)  # a stream's context manager takes as long as three launches
        try:
            with torch.inference_mode():
                download = self._enqueue(plan)
        finally:
            torch.cuda.set_stream(current)
        self._newest = download.done
        self._waiter.push(PendingStep(download.done, download.report, future))
        return future

    @property
    def can_mask_ahead(self) -> bool:
        """False: sampling is enqueued with the rest of a step, and a mask is made from the token before."""
        return False

    @property
    def num_late_compilations(self) -> int:
        return self._compilations.compilations()

    @property
    def num_idle_launches(self) -> int:
        return self._num_idle_launches

    def warm_up(self) -> None:
        sizes = warm_up_sizes(self._limits.max_num_batched_tokens)
        for plan in warm_up_plans(self._limits, sizes):  # what has no graph compiles here
            self.launch(plan).result()
        self._compilations.mark()

    def close(self) -> None:
        if self._waiter is None:
            return
        waiter, self._waiter = self._waiter, None
        waiter.close()
        self._compilations.close()
        try:
            self._compute.synchronize()
        except RuntimeError as error:  # a step has failed, as its future has said, and nothing on the device works
            logger.warning("the device has failed and is left alone: %s", error)
            return
        self._graphs.destroy()
        # Weights and pages go with these, though whoever closes keeps the runner.
        del self._state, self._staging, self._body, self._head, self._graphs, self._sampler, self._prompt_scores
        torch.cuda.empty_cache()

    def _enqueue(self, plan: StepPlan) -> Download:
        for start in plan.row_starts:
            self._sampler.start_row(start)
            self._prompt_scores.start_row(start)
        num_sampled = plan.num_sampled
        captured_body = self._graphs.body(plan)
        size, captured_head = self._graphs.head(num_sampled)
        shape = captured_body.shape if captured_body else exact_shape(plan)
        staged = self._staging.send(plan, shape, size)
        if not plan.rows:
            return self._downloads.nothing(plan.step_id)
        self._num_idle_launches += self._newest.query()  # all but the launch itself is done
        if captured_body is None:
            self._body.run_eagerly(plan, shape, staged.lens)
        else:
            self._body.replay(captured_body, staged.lens)
        scores = self._prompt_scores.score(plan, self._state.hidden)
        if num_sampled == 0 and not scores:
            return self._downloads.nothing(plan.step_id)
        if staged.is_plain and not scores:
            return self._sample_plainly(plan.step_id, num_sampled, size, captured_head)
        return self._sample_fully(plan.step_id, staged, captured_head, size, scores)

    def _sample_plainly(self, step_id: int, num_sampled: int, size: int, head: CapturedHead | None) -> Download:
        """Greedy rows and plain draws: sampling is part of the graph."""
        if head is None:
            self._head.score_and_sample(size)
        else:
            head.sampling.replay()
        return self._downloads.plain(step_id, self._state.token_ids[:num_sampled])

    def _sample_fully(
        self, step_id: int, staged: StagedStep, head: CapturedHead | None, size: int, scores: list[ChunkScores]
    ) -> Download:
        """Any parameters: the graph ends with the logits, the sampler takes them from there."""
        rows, positions = staged.sampled.rows, staged.sampled.positions
        if rows.size == 0:
            return self._downloads.groups(
                [chunk.tensors for chunk in scores],
                lambda groups: _with_scores(StepTokens(step_id, []), scores, groups),
            )
        if head is None:
            self._head.score(size)
        else:
            head.scoring.replay()
        sampled = self._sampler.sample(self._state.logits[: rows.size], rows, positions)
        at = self._upload(np.stack((rows, positions)))
        self._state.token_pool[at[0], at[1]] = sampled.token_ids.int()
        return self._downloads.groups(
            [sampled.tensors(), *(chunk.tensors for chunk in scores)],
            lambda groups: _with_scores(sampled.report(step_id, groups[0]), scores, groups[1:]),
        )


def _with_scores(tokens: StepTokens, scores: list[ChunkScores], groups: list[list[torch.Tensor]]) -> StepTokens:
    """Add what the prompts' own tokens scored."""
    if scores:
        tokens.prompt_logprobs = {chunk.place: chunk.report(group) for chunk, group in zip(scores, groups, strict=True)}
    return tokens

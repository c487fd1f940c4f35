"""For tests of the runner: a model that is a table, and a driver that schedules at random without a scheduler."""

import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from doubles_attention import torch_backend
from torch import Tensor

from aserve.attention.base import AttentionBackend
from aserve.attention.context import ForwardContext
from aserve.kernels.operators import Operators
from aserve.request import SamplingParams
from aserve.runner.base import ModelRunner
from aserve.runner.compute_thread import ComputeThread
from aserve.runner.executor import DeviceParts, StepExecutor
from aserve.runner.kv_pool import KVLayout, allocate_pool
from aserve.runner.torch_runner import TorchRunner
from aserve.scheduler.limits import Limits
from aserve.scheduler.plan import RowStart, StepPlan, StepTokens

EOS = 2
CPU = torch.device("cpu")


class TableModel:
    """Predicts token t + 1 after token t; ``on_forward`` sees each step's ids first and may wait or raise."""

    def __init__(self, vocab_size: int = 50, on_forward: Callable[[Tensor], None] = lambda ids: None) -> None:
        self.config = SimpleNamespace(vocab_size=vocab_size, num_layers=1, num_kv_heads=1, head_dim=4)
        self.bad_token_id = -1  # its successor's logits are NaN
        self._on_forward = on_forward

    def forward(self, token_ids: Tensor, ctx: ForwardContext) -> Tensor:
        self._on_forward(token_ids)
        return token_ids.float().unsqueeze(1)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        vocab_size = self.config.vocab_size
        logits = torch.nn.functional.one_hot((hidden[:, 0].long() + 1) % vocab_size, vocab_size).float() * 8
        logits[hidden[:, 0] == self.bad_token_id] = math.nan
        return logits


def make_runner(
    model: Any,
    *,
    max_num_seqs: int = 4,
    max_model_len: int = 64,
    num_pages: int = 64,
    page_size: int = 4,
    max_num_tokens: int = 128,
    backend: AttentionBackend | None = None,
    device: torch.device = CPU,
) -> tuple[TorchRunner, DeviceParts]:
    """A runner over ``model`` with a pool full of NaN, so that whatever is read before it is written shows."""
    layout = KVLayout(model.config.num_layers, model.config.num_kv_heads, model.config.head_dim, torch.float32, device)
    layers_kv = allocate_pool(layout, page_size, num_pages)
    for layer in layers_kv:
        layer.key[:num_pages].fill_(math.nan)
        layer.value[:num_pages].fill_(math.nan)
    parts = DeviceParts(
        model=model,
        backend=backend or torch_backend(),
        operators=Operators(),
        layers_kv=layers_kv,
        device=device,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        max_num_tokens=max_num_tokens,
        num_pages=num_pages,
        page_size=page_size,
    )
    limits = Limits(model.config.vocab_size, max_model_len, max_num_seqs, max_num_tokens, num_pages, page_size)
    return TorchRunner(StepExecutor(parts, {EOS}), limits, ComputeThread(1)), parts


def single_plan(
    token_ids: Sequence[int],
    params: SamplingParams | None = None,
    *,
    row: int = 0,
    first_page: int = 0,
    page_size: int = 4,
    step_id: int = 0,
) -> StepPlan:
    """A whole prompt on ``row``, sampled, on consecutive pages with room for one more."""
    params = params or SamplingParams(temperature=0.0)
    num_pages = len(token_ids) // page_size + 1
    return StepPlan(
        step_id=step_id,
        rows=[row],
        num_computed=[0],
        num_scheduled=[len(token_ids)],
        is_sampled=[True],
        row_starts=[RowStart(row, list(token_ids), len(token_ids), 0, params)],
        page_updates=[(row, i, first_page + i) for i in range(num_pages)],
    )


@dataclass
class Run:
    """One sequence on its way: ``known`` tokens on the host, of which ``computed`` are in launched steps."""

    prompt: list[int]
    num_outputs: int
    params: SamplingParams
    seed: int
    known: list[int] = field(default_factory=list)
    computed: int = 0
    launched_outputs: int = 0
    row: int = -1
    pages: list[int] = field(default_factory=list)
    is_started: bool = False
    is_verifying: bool = False
    expected: list[int] = field(default_factory=list)  # outputs that drafts are made of, right ones and wrong ones

    @property
    def outputs(self) -> list[int]:
        return self.known[len(self.prompt) :]


class RandomDriver:
    """Feeds a runner steps of random chunks and decodes, one or two in flight, preempting now and then.

    It shares no code with the scheduler: the runner alone is under test.
    """

    def __init__(self, runner: ModelRunner, runs: list[Run], seed: int) -> None:
        self._runner = runner
        self._limits = runner.limits
        self._random = random.Random(seed)
        self._waiting = list(runs)
        self._running: list[Run] = []
        self._free_rows = list(range(self._limits.max_num_seqs))
        self._free_pages = list(range(self._limits.num_pages))
        self._random.shuffle(self._free_pages)
        self.num_preemptions = 0
        self.num_mixed_steps = 0
        self.num_accepted: Counter[int] = Counter()  # drafts, by how many of a row's were right

    def run(self) -> None:
        flights: list[tuple[StepPlan, list[Run], Future[StepTokens]]] = []
        step_id = 0
        while self._waiting or self._running or flights:
            if self._running and self._random.random() < 0.1:
                while flights:
                    self._finish(*flights.pop(0))
                if self._running:
                    self._preempt(self._random.choice(self._running))
            planned = self._plan(step_id) if len(flights) < 2 else None
            if planned is not None:
                plan, members = planned
                flights.append((plan, members, self._runner.launch(plan)))
                step_id += 1
            if flights and (planned is None or len(flights) == 2 or self._random.random() < 0.5):
                self._finish(*flights.pop(0))

    def _plan(self, step_id: int) -> tuple[StepPlan, list[Run]] | None:
        plan = StepPlan(step_id)
        self._admit()
        budget = self._random.randint(1, self._limits.max_num_batched_tokens)
        ready = [run for run in self._running if run.launched_outputs < run.num_outputs and not run.is_verifying]
        decodes = [run for run in ready if self._is_decode(run)]
        chunks = [run for run in ready if not self._is_decode(run)]
        self._random.shuffle(decodes)
        self._random.shuffle(chunks)
        most = self._limits.max_num_drafts
        drafts_of: dict[int, list[int]] = {}
        for run in decodes:
            room = None if most is None else most - sum(map(len, drafts_of.values()))
            if drafts := self._guess(run)[:room]:
                drafts_of[id(run)] = drafts
        decodes.sort(key=lambda run: id(run) in drafts_of)
        members = []
        for run in decodes + chunks:
            total = len(run.prompt) + run.launched_outputs
            drafts = drafts_of.get(id(run), [])
            count = 1 + len(drafts) if run in decodes else self._random.randint(1, total - run.computed)
            if count > budget and drafts:
                continue
            count = min(count, budget)
            if count == 0 or not self._grow(run, run.computed + count + 1, plan):
                continue
            budget -= count
            if drafts:
                self._verify(plan, run, drafts)
            else:
                self._add(plan, run, count, total)
                plan.num_decodes += run in decodes
            members.append(run)
        self.num_mixed_steps += 0 < plan.num_decodes < len(plan.rows)
        return (plan, members) if members else None

    def _is_decode(self, run: Run) -> bool:
        return (
            run.is_started and run.launched_outputs > 0 and run.computed == len(run.prompt) + run.launched_outputs - 1
        )

    def _add(self, plan: StepPlan, run: Run, count: int, total: int) -> None:
        if not run.is_started:
            plan.row_starts.append(RowStart(run.row, list(run.known), len(run.prompt), run.seed, run.params))
            run.is_started = True
        plan.rows.append(run.row)
        plan.num_computed.append(run.computed)
        plan.num_scheduled.append(count)
        run.computed += count
        is_sampled = run.computed == total
        plan.is_sampled.append(is_sampled)
        run.launched_outputs += is_sampled

    def _guess(self, run: Run) -> list[int]:
        """Return what may follow the token in flight, up to the last output but one, right or wrong at random."""
        first = run.launched_outputs
        if not run.expected or self._random.random() < 0.4:
            return []
        drafts = run.expected[first : min(run.num_outputs - 1, first + self._random.randint(1, 6))]
        if drafts and self._random.random() < 0.5:
            place = self._random.randrange(len(drafts))
            drafts[place] = (drafts[place] + 1) % self._limits.vocab_size
        return drafts

    def _verify(self, plan: StepPlan, run: Run, drafts: list[int]) -> None:
        plan.rows.append(run.row)
        plan.num_computed.append(run.computed)
        plan.num_scheduled.append(1 + len(drafts))
        plan.is_sampled.append(True)
        plan.drafts.append(drafts)
        run.is_verifying = True

    def _admit(self) -> None:
        while self._waiting and self._free_rows and self._random.random() < 0.7:
            run = self._waiting.pop(0)
            run.row = self._free_rows.pop(self._random.randrange(len(self._free_rows)))
            run.known = run.known or list(run.prompt)
            run.launched_outputs = len(run.outputs)
            self._running.append(run)

    def _grow(self, run: Run, num_tokens: int, plan: StepPlan) -> bool:
        missing = -(-num_tokens // self._limits.page_size) - len(run.pages)
        if missing > len(self._free_pages):
            return False
        for _ in range(max(0, missing)):
            page = self._free_pages.pop()
            plan.page_updates.append((run.row, len(run.pages), page))
            run.pages.append(page)
        return True

    def _finish(self, plan: StepPlan, members: list[Run], future: "Future[StepTokens]") -> None:
        tokens = future.result(timeout=60)
        assert tokens.step_id == plan.step_id
        sampled = [run for run, is_sampled in zip(members, plan.is_sampled, strict=True) if is_sampled]
        drafts_of = {id(run): drafts for run, drafts in zip(members[plan.num_decodes :], plan.drafts, strict=False)}
        token_ids = iter(tokens.token_ids)
        for run in sampled:
            run.known.append(next(token_ids))
            if run.is_verifying and id(run) in drafts_of:
                self._accept(run, drafts_of[id(run)], [next(token_ids) for _ in drafts_of[id(run)]])
            if len(run.outputs) == run.num_outputs:
                self._running.remove(run)
                self._release(run)

    def _accept(self, run: Run, drafts: list[int], following: list[int]) -> None:
        """Take what was sampled after each draft that is right; the first sample is taken already."""
        num_accepted = 0
        for draft, token_id in zip(drafts, following, strict=True):
            if run.known[-1] != draft:
                break
            run.known.append(token_id)
            num_accepted += 1
        self.num_accepted[num_accepted] += 1
        run.is_verifying = False
        run.computed = len(run.known) - 1
        run.launched_outputs = len(run.outputs)

    def _preempt(self, run: Run) -> None:
        self.num_preemptions += 1
        self._running.remove(run)
        self._release(run)
        run.computed, run.is_started = 0, False
        self._waiting.insert(0, run)

    def _release(self, run: Run) -> None:
        self._free_rows.append(run.row)
        self._free_pages += run.pages
        run.pages = []
        self._random.shuffle(self._free_pages)

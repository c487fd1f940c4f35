"""The runner of rank 0 where several ranks execute each step: plans go out to all, rank 0's tokens come back."""

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from tempfile import TemporaryDirectory

from aserve.distributed.group import RankGroup
from aserve.distributed.messages import Execute, PrepareGrammar, WarmUp
from aserve.distributed.step_digest import StepDigest
from aserve.request import GrammarSpec
from aserve.runner.base import ModelRunner
from aserve.runner.ranks.other_ranks import OtherRanks
from aserve.runner.ranks.step_agreement import StepAgreement
from aserve.scheduler.limits import Limits
from aserve.scheduler.plan import StepPlan, StepTokens


class RankedRunner(ModelRunner):
    """Rank 0 alone plans; a step is complete when every rank has executed it and none has another hash of it."""

    def __init__(
        self,
        local: ModelRunner,
        others: OtherRanks,
        agreement: StepAgreement,
        group: RankGroup,
        folder: "TemporaryDirectory[str]",
    ) -> None:
        """Take rank 0's own runner and the others, who are ready and met in ``folder``."""
        self._local = local
        self._others = others
        self._agreement = agreement
        self._group = group
        self._folder = folder
        self._digest = StepDigest()

    @property
    def limits(self) -> Limits:
        return self._local.limits

    @property
    def num_late_compilations(self) -> int:
        return self._local.num_late_compilations

    @property
    def num_idle_launches(self) -> int:
        return self._local.num_idle_launches

    @property
    def can_mask_ahead(self) -> bool:
        return self._local.can_mask_ahead

    def watch(self, on_failure: Callable[[Exception], None]) -> None:
        self._agreement.watch(on_failure)

    def launch(self, plan: StepPlan) -> "Future[StepTokens]":
        """Launch ``plan`` on every rank. Raises EngineDeadError once one is lost or has diverged."""
        future = self._agreement.expect(plan.step_id)
        try:
            self._others.broadcast(Execute(plan))
            self._local.launch(plan).add_done_callback(partial(self._note_done, plan))
        except Exception as error:
            raise self._agreement.fail(error)  # noqa: B904 - most often the same
        return future

    def prepare_grammar(self, grammar: GrammarSpec) -> None:
        self._others.broadcast(PrepareGrammar(grammar))
        self._others.await_milestone()

    def warm_up(self) -> None:
        self._others.broadcast(WarmUp())
        try:
            self._local.warm_up()
        except Exception as error:
            raise self._fail(error)  # noqa: B904 - most often the same

    def close(self) -> None:
        if self._agreement.failure is None:
            self._others.dismiss()
        else:
            self._others.end(0.0)  # rank 0 may wait for one of them
            self._group.abort()
        self._local.close()
        self._group.close()
        self._others.end()
        self._folder.cleanup()

    def _note_done(self, plan: StepPlan, done: "Future[StepTokens]") -> None:
        """Called on rank 0's own thread, in the order of steps."""
        error = done.exception()
        if error is None:
            tokens = done.result()
            self._agreement.answer(tokens, self._digest.advance(plan, tokens))
        else:
            self._fail(_as_exception(error))

    def _fail(self, error: Exception) -> Exception:
        """Fail all steps, and return why: collectives fail when a rank ends, and do not say so."""
        if self._agreement.failure is not None:
            return self._agreement.failure
        return self._agreement.fail(self._others.find_ended() or error)


def _as_exception(error: BaseException) -> Exception:
    return error if isinstance(error, Exception) else RuntimeError(repr(error))

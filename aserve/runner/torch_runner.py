"""The runner of devices that torch drives synchronously: one compute thread executes launched steps in order."""

from concurrent.futures import Future

from aserve.errors import EngineDeadError
from aserve.runner.base import ModelRunner
from aserve.runner.compute_thread import ComputeThread
from aserve.runner.executor import StepExecutor
from aserve.runner.warm_up import warm_up_plans
from aserve.scheduler.limits import Limits
from aserve.scheduler.plan import StepPlan, StepTokens


class TorchRunner(ModelRunner):
    """``launch`` only enqueues; the thread computes without the interpreter lock for most of a step."""

    def __init__(self, executor: StepExecutor, limits: Limits, thread: ComputeThread) -> None:
        self._executor: StepExecutor | None = executor
        self._limits = limits
        self._thread = thread
        self._failure: BaseException | None = None

    @property
    def limits(self) -> Limits:
        return self._limits

    def launch(self, plan: StepPlan) -> "Future[StepTokens]":
        """Enqueue ``plan``. Raises EngineDeadError once closed."""
        if self._executor is None:
            raise EngineDeadError("the runner is closed")
        return self._thread.submit(self._execute, self._executor, plan)

    def warm_up(self) -> None:
        for plan in warm_up_plans(self._limits):
            self.launch(plan).result()

    def close(self) -> None:
        self._executor = None
        self._thread.close()

    def _execute(self, executor: StepExecutor, plan: StepPlan) -> StepTokens:
        """Run on the compute thread. After a failed step the device's state is unknown, so all later ones fail too."""
        if self._failure is not None:
            raise EngineDeadError("an earlier step failed") from self._failure
        try:
            return executor.execute(plan)
        except BaseException as error:
            self._failure = error
            raise

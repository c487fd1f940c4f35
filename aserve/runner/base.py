"""The border between the step loop and a device: one class per kind of device implements it."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future

from aserve.request import GrammarSpec
from aserve.scheduler.limits import Limits
from aserve.scheduler.plan import StepPlan, StepTokens


class ModelRunner(ABC):
    """Executes steps in the order of their launch and owns everything on the device.

    Row ``max_num_seqs`` of the page table is the dummy row; its pages (numbers from ``num_pages`` on) belong to nobody.
    """

    @property
    @abstractmethod
    def limits(self) -> Limits:
        """Sizes that the scheduler plans with."""

    @property
    def num_late_compilations(self) -> int:
        """Kernels that were compiled or loaded after ``warm_up``: each one made a step wait."""
        return 0

    @property
    def num_idle_launches(self) -> int:
        """Steps whose launch found the device with nothing to do: where this grows under load, the host is slow."""
        return 0

    @property
    def can_mask_ahead(self) -> bool:
        """Whether a step may be launched while a row's token, which its grammar needs to know, is still on its way."""
        return True

    @abstractmethod
    def launch(self, plan: StepPlan) -> "Future[StepTokens]":
        """Enqueue ``plan`` and return at once; never waits for the device.

        The future completes from another thread, in the order of the launches. It fails
        only if the step as a whole failed, after which the runner is unusable.
        """

    def watch(self, on_failure: Callable[[Exception], None]) -> None:  # noqa: B027 - most fail only with a step
        """Call ``on_failure``, from any thread, when the runner becomes unusable, even while no step is launched."""

    def prepare_grammar(self, grammar: GrammarSpec) -> None:  # noqa: B027 - most take what the engine compiles
        """Block until every process that needs ``grammar`` compiled has it so; from one thread, beside other calls.

        Raises EngineDeadError if one is lost.
        """

    @abstractmethod
    def warm_up(self) -> None:
        """Run real steps of the usual shapes on the dummy row, so that nothing compiles once ready."""

    @abstractmethod
    def close(self) -> None:
        """Wait for launched steps and release the device. Idempotent."""

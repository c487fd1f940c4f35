"""All ranks but rank 0: given orders together, listened to one by one, ended together."""

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence

from aserve.distributed.messages import Close, Executed, Failed, Milestone, Order, encode
from aserve.distributed.rank_process import RankProcess
from aserve.errors import EngineDeadError
from aserve.runner.ranks.step_agreement import StepAgreement

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 3.0  # for a rank to end by itself
NOTICE_S = 0.2  # from a rank's connections closing to its end being known


class OtherRanks:
    """A thread for each process passes on what it says, and notices when it ends."""

    def __init__(
        self, processes: Sequence[RankProcess], agreement: StepAgreement, on_loss: Callable[[], None] = lambda: None
    ) -> None:
        """Steps that are reported, and the loss of a rank, go to ``agreement``; ``on_loss`` is called before that."""
        self._processes = processes
        self._agreement = agreement
        self._on_loss = on_loss
        self._milestones: queue.SimpleQueue[Milestone | EngineDeadError] = queue.SimpleQueue()
        self._is_closing = False
        self._threads = [
            threading.Thread(target=self._listen, args=(process,), name=f"aserve-rank-{process.rank}", daemon=True)
            for process in processes
        ]
        for thread in self._threads:
            thread.start()

    def await_milestone(self) -> list[Milestone]:
        """Wait until each rank has said once more that it is done: started, then ready, then with what was to prepare.

        Raises EngineDeadError if one fails instead.
        """
        reached = []
        for _ in self._processes:
            milestone = self._milestones.get()
            if isinstance(milestone, EngineDeadError):
                raise milestone
            reached.append(milestone)
        return reached

    def broadcast(self, order: Order) -> None:
        """Give ``order`` to each rank. Raises EngineDeadError if one is gone or does not listen."""
        encoded = encode(order)
        for process in self._processes:
            try:
                process.send(encoded)
            except OSError as error:
                raise EngineDeadError(f"rank {process.rank} takes no orders: {error}") from error

    def find_ended(self) -> EngineDeadError | None:
        """Return what to say of a rank that has just ended, None if all run."""
        deadline = time.monotonic() + NOTICE_S
        for process in self._processes:
            status = process.exit_status(max(0.0, deadline - time.monotonic()))
            if status is not None:
                return EngineDeadError(f"rank {process.rank} has ended with status {status}")
        return None

    def dismiss(self) -> None:
        """Let each rank finish what was launched, and end."""
        self._is_closing = True
        for process in self._processes:
            with contextlib.suppress(OSError):
                process.send(encode(Close()))

    def end(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Wait until all have ended; those that still run after ``timeout_s`` are killed. Idempotent."""
        self._is_closing = True
        deadline = time.monotonic() + timeout_s
        for process, thread in zip(self._processes, self._threads, strict=True):
            if process.exit_status(max(0.0, deadline - time.monotonic())) is None:
                process.kill()
            if thread is not threading.current_thread():
                thread.join()
            process.close()

    def _listen(self, process: RankProcess) -> None:
        while (report := process.receive()) is not None:
            match report:
                case Executed(digest):
                    self._agreement.report(process.rank, digest)
                case Failed(message):
                    self._lose(EngineDeadError(f"rank {process.rank} has failed: {message}"))
                case _:
                    self._milestones.put(report)
        if not self._is_closing:
            self._lose(EngineDeadError(f"rank {process.rank} has ended with status {process.exit_status()}"))

    def _lose(self, error: EngineDeadError) -> None:
        """Tell who waits for the ranks, and end the others, which wait for the lost one."""
        if not self._is_closing:
            logger.error("%s", error)
        self._is_closing = True
        self._on_loss()
        self._agreement.fail(error)
        self._milestones.put(error)
        for process in self._processes:
            process.kill()

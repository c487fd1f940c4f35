"""Rank 0 and others that are threads with scripted devices: agreement, divergence, failures and the end."""

import contextlib
import socket
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from doubles_demo_engine import complete_all, in_loop, settled_stats
from doubles_engine import LIMITS, LetterTokenizer, RecordingSink, letters, request, running_engine, until

from aserve.config import EngineConfig
from aserve.distributed.channel import Channel
from aserve.distributed.context_shard import ContextShard
from aserve.distributed.group import RankGroup
from aserve.distributed.messages import Setup, encode
from aserve.distributed.rank_process import RankProcess
from aserve.errors import ClientError, EngineDeadError
from aserve.model_files import ModelFiles
from aserve.request import FinishReason, GrammarSpec, SamplingParams
from aserve.runner.ranks.follower import Follower
from aserve.runner.ranks.other_ranks import OtherRanks
from aserve.runner.ranks.ranked_runner import RankedRunner
from aserve.runner.ranks.step_agreement import StepAgreement
from aserve.runner.ranks.worker import _run, end_with
from aserve.runner.scripted import Script, ScriptedRunner
from aserve.scheduler.plan import StepTokens
from aserve.structured.compile import GrammarCompiler


class RankThread:
    """Stands in for a process: runs what a worker runs once it is ready, until it is told, or killed."""

    def __init__(self, script: Script) -> None:
        self.runner = ScriptedRunner(LIMITS, script)
        self.compiler = GrammarCompiler(LetterTokenizer())
        ours, theirs = socket.socketpair()
        self.channel, self._their_channel, self._their_socket = Channel(ours), Channel(theirs), theirs
        self._status: int | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            Follower(self._their_channel, self.runner, self.compiler).follow()
            self._status = 0
        except EngineDeadError:
            self._status = 1
        self.runner.close()
        self._their_channel.close()

    def kill(self) -> None:
        with contextlib.suppress(OSError):  # it has ended
            self._their_socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()

    def wait(self, timeout: float | None = None) -> int:
        self._thread.join(timeout)
        if self._status is None:
            raise subprocess.TimeoutExpired("rank", timeout or 0.0)
        return self._status


@dataclass
class Ranks:
    """A runner over rank 0 and its others."""

    runner: RankedRunner
    local: ScriptedRunner
    threads: list[RankThread]
    lost: list[bool] = field(default_factory=list)


def make_ranks(*scripts: Script, group: RankGroup | None = None) -> Ranks:
    """One rank for each script, rank 0 first."""
    local, threads = ScriptedRunner(LIMITS, scripts[0]), [RankThread(script) for script in scripts[1:]]
    agreement, lost = StepAgreement(len(scripts)), list[bool]()
    processes = [RankProcess(rank, thread, thread.channel) for rank, thread in enumerate(threads, 1)]  # type: ignore[arg-type]
    group = group or RankGroup(ContextShard(0, len(scripts)), torch.device("cpu"))  # which nobody joins

    def note_loss() -> None:
        lost.append(True)
        group.abort()

    others = OtherRanks(processes, agreement, note_loss)
    folder = tempfile.TemporaryDirectory()
    return Ranks(RankedRunner(local, others, agreement, group, folder), local, threads, lost)


def other_letters(tokens: Sequence[int], position: int) -> int:
    """Like ``letters`` up to position 9."""
    return letters(tokens, position) + (position == 9)


@in_loop
async def test_every_rank_executes_what_rank_0_plans() -> None:
    """Under prefix hits, chunks and preemption; the pools of all ranks' tokens are equal after it."""
    ranks = make_ranks(letters, letters, letters)
    async with running_engine(ranks.runner) as engine:  # type: ignore[arg-type]
        prompts = [[97 + i % 3] * (5 + 9 * i) for i in range(20)]
        outputs = await complete_all(engine, prompts, SamplingParams(max_tokens=20))
        await settled_stats(engine)
        for prompt, output in zip(prompts, outputs, strict=True):
            tokens = list(prompt)
            while len(tokens) < len(prompt) + 20:
                tokens.append(letters(tokens, len(tokens)))
            assert output.token_ids == tokens[len(prompt) :]
    for thread in ranks.threads:
        assert thread.runner.num_launched == ranks.local.num_launched
        assert thread.runner.token_pool == ranks.local.token_pool
        assert thread.runner.page_table == ranks.local.page_table
        assert thread.wait() == 0
    assert ranks.local.is_closed
    assert not ranks.lost


@in_loop
async def test_grammars_are_compiled_on_every_rank_before_their_requests_start() -> None:
    """And one that cannot be used is refused as it always is."""
    ranks = make_ranks(letters, letters, letters)
    async with running_engine(ranks.runner) as engine:  # type: ignore[arg-type]
        spec = GrammarSpec("regex", "[ab]+")
        await engine.prepare(SamplingParams(grammar=spec))
        assert all(thread.compiler.find(spec) is not None for thread in ranks.threads)
        with pytest.raises(ClientError, match="regex cannot be used"):
            await engine.prepare(SamplingParams(grammar=GrammarSpec("regex", "[ab")))
        ranks.threads[0].kill()
        with pytest.raises(EngineDeadError):
            await engine.prepare(SamplingParams(grammar=GrammarSpec("regex", "[cd]+")))


@in_loop
async def test_a_rank_that_samples_another_token_ends_the_engine(tmp_path: Path) -> None:
    ranks = make_ranks(letters, letters, other_letters)
    async with running_engine(ranks.runner, trace_file=str(tmp_path / "trace")) as engine:  # type: ignore[arg-type]
        sinks = [RecordingSink() for _ in range(4)]
        for number, sink in enumerate(sinks):
            engine.add(request(str(number), "abc", max_tokens=50), sink)
        await until(lambda: all(sink.is_ended for sink in sinks))
        assert all("ranks have diverged in step 7 (rank " in str(sink.error) for sink in sinks)
        assert max(len(sink.token_ids) for sink in sinks) <= 9 - 3, "a token that some rank does not have was told"
        assert isinstance(engine.failure, EngineDeadError)
    assert {thread.wait() for thread in ranks.threads} == {1}


@in_loop
async def test_a_rank_that_fails_says_why(tmp_path: Path) -> None:
    def fail(tokens: Sequence[int], position: int) -> int:
        raise MemoryError("no room on this one")

    ranks = make_ranks(letters, fail)
    async with running_engine(ranks.runner, trace_file=str(tmp_path / "trace")) as engine:  # type: ignore[arg-type]
        sink = RecordingSink()
        engine.add(request("a", "abc"), sink)
        await until(lambda: sink.is_ended)
        assert str(engine.failure) == "rank 1 has failed: MemoryError: no room on this one"
    assert ranks.lost


@in_loop
async def test_a_rank_that_is_lost_while_nothing_runs_ends_the_engine_at_once(tmp_path: Path) -> None:
    ranks = make_ranks(letters, letters, letters)
    async with running_engine(ranks.runner, trace_file=str(tmp_path / "trace")) as engine:  # type: ignore[arg-type]
        await complete_all(engine, [[97, 98]], SamplingParams(max_tokens=3))
        assert engine.is_ready
        ranks.threads[1].kill()
        await until(lambda: engine.failure is not None)
        assert str(engine.failure) == "rank 2 has ended with status 1"
        assert not engine.is_ready
        with pytest.raises(EngineDeadError):
            engine.add(request("late", "abc"), RecordingSink())


@in_loop
async def test_a_failure_of_rank_0_ends_the_others(tmp_path: Path) -> None:
    ranks = make_ranks(letters, letters)
    ranks.local.fail_step(2, RuntimeError("the device is gone"))
    async with running_engine(ranks.runner, trace_file=str(tmp_path / "trace")) as engine:  # type: ignore[arg-type]
        sink = RecordingSink()
        engine.add(request("a", "abc", max_tokens=9), sink)
        await until(lambda: sink.is_ended)
        assert str(engine.failure) == "the device is gone"
        assert sink.finish_reason is None or sink.finish_reason is FinishReason.ERROR
    assert ranks.threads[0].wait() == 1


def test_a_step_completes_with_the_last_report_and_in_order() -> None:
    agreement = StepAgreement(2)
    first, second = agreement.expect(1), agreement.expect(2)
    agreement.report(1, b"one")
    agreement.report(1, b"two")
    assert not first.done()
    agreement.answer(StepTokens(1, [5]), b"one")
    assert first.result(0) == StepTokens(1, [5])
    assert not second.done()
    agreement.answer(StepTokens(2, [6]), b"two")
    assert second.result(0) == StepTokens(2, [6])


def test_the_first_failure_is_the_one_that_everyone_hears() -> None:
    agreement, heard = StepAgreement(2), list[Exception]()
    agreement.watch(heard.append)
    step = agreement.expect(1)
    error = EngineDeadError("rank 1 is gone")
    agreement.fail(error)
    agreement.fail(RuntimeError("connection closed by peer"))
    agreement.answer(StepTokens(1, [5]), b"too late")
    assert step.exception(0) is error
    assert heard == [error]
    with pytest.raises(EngineDeadError, match="rank 1 is gone"):
        agreement.expect(2)
    agreement.watch(heard.append)
    assert heard == [error, error], "who comes later must hear it, too"


def test_a_rank_that_ends_while_all_warm_up_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 then sees a collective fail, and not why."""
    ranks = make_ranks(letters, letters)

    def warm_up() -> None:
        ranks.threads[0].kill()
        raise RuntimeError("connection closed by peer")

    monkeypatch.setattr(ranks.local, "warm_up", warm_up)
    with pytest.raises(EngineDeadError, match="rank 1 has ended with status 1"):
        ranks.runner.warm_up()
    ranks.runner.close()


@pytest.mark.parametrize("who_fails", ["another rank", "rank 0"])
def test_kernels_that_wait_for_a_lost_rank_end_before_graphs_do(
    monkeypatch: pytest.MonkeyPatch, who_fails: str
) -> None:
    """NCCL lets them go at once, and comes back from that only when no graph has collectives any more."""
    graphs_are_gone, kernels_end, events = threading.Event(), threading.Event(), list[str]()

    def abort() -> None:
        events.append("kernels end")
        kernels_end.set()
        assert graphs_are_gone.wait(60)
        events.append("the group is left")

    monkeypatch.setattr("torch.distributed.distributed_c10d._abort_process_group", abort)
    group = RankGroup(ContextShard(0, 2), torch.device("cuda"))
    group._is_joined = True
    ranks = make_ranks(letters, letters, group=group)
    close = ranks.local.close

    def close_local() -> None:
        assert kernels_end.wait(60)
        events.append("graphs are destroyed")
        graphs_are_gone.set()
        close()

    monkeypatch.setattr(ranks.local, "close", close_local)
    failed = threading.Event()
    ranks.runner.watch(lambda error: failed.set())
    if who_fails == "rank 0":
        ranks.runner._fail(RuntimeError("the device has failed"))
    else:
        ranks.threads[0].kill()
    assert failed.wait(60)
    ranks.runner.close()
    assert events == ["kernels end", "graphs are destroyed", "the group is left"]


def test_a_worker_that_loses_rank_0_takes_the_store_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = tmp_path / "group" / "store"
    store.parent.mkdir()
    store.touch()
    ours, theirs = socket.socketpair()
    files = ModelFiles(tmp_path, "safetensors", "tiny")
    Channel(ours).send(encode(Setup(1, 2, str(store), EngineConfig(device="cpu"), files, [], False)))

    def lose(group: RankGroup, store: Path) -> None:
        raise EngineDeadError("it is gone")

    monkeypatch.setattr(RankGroup, "join", lose)
    monkeypatch.setattr("aserve.runner.ranks.worker.end_with", lambda parent_id, store: None)
    with ours, theirs, pytest.raises(EngineDeadError, match="it is gone"):
        _run(Channel(theirs), 7)
    assert not store.parent.exists()


def test_a_worker_ends_with_its_parent_and_takes_the_store_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it waits for: another process gets the orphan as its child."""
    store = tmp_path / "group" / "store"
    store.parent.mkdir()
    store.touch()
    parents, statuses = iter([7, 7, 1]), list[int]()
    monkeypatch.setattr("aserve.runner.ranks.worker.PARENT_POLL_S", 0.0)
    monkeypatch.setattr("os.getppid", lambda: next(parents))
    monkeypatch.setattr("os._exit", statuses.append)
    end_with(7, store)
    assert statuses == [1]
    assert not store.parent.exists()

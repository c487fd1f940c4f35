"""What an engine is made of before it can run, found and built in one blocking call."""

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

from aserve.config import EngineConfig
from aserve.kernels.cpu.library import build_ahead
from aserve.model_files import ModelFiles
from aserve.runner.base import ModelRunner
from aserve.structured.compile import GrammarCompiler
from aserve.tokenizer.tokenizer import Tokenizer

T = TypeVar("T")
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EngineParts:
    """A warm runner, what turns text into its tokens, and what tells it which of them a grammar allows."""

    runner: ModelRunner
    tokenizer: Tokenizer
    compiler: GrammarCompiler
    model_name: str


def load_parts(config: EngineConfig, runner: ModelRunner | None, tokenizer: Tokenizer | None) -> EngineParts:
    """Locate and load the model, unless ``runner`` and ``tokenizer`` are given, and run the warm-up steps."""
    name = config.served_model_name or config.model or "scripted"
    is_given = runner is not None
    if not is_given and config.device != "cuda":
        build_ahead()
    files = None
    if runner is None or tokenizer is None:
        files = _locate(config)
        name = config.served_model_name or files.name
        tokenizer = tokenizer or _load_tokenizer(files)
    compiler = GrammarCompiler(tokenizer)
    if runner is None:
        assert files is not None
        runner = _build_runner(config, files, compiler)
    try:
        runner.warm_up()
        if not is_given and compiler.eos_token_ids:  # without an end token there are no grammars
            compiler.load_vocabulary()  # the first grammar would hold up every stream for it
    except BaseException:
        runner.close()
        raise
    return EngineParts(runner, tokenizer, compiler, name)


def close_unwanted(loading: "Future[EngineParts]") -> None:
    """Close what a cancelled start has loaded."""
    if not loading.cancelled() and loading.exception() is None:
        loading.result().runner.close()


# The modules behind these load tokenizers and torch, which `import aserve` must not.


def _locate(config: EngineConfig) -> ModelFiles:
    from aserve.model_files import locate_model

    return locate_model(config)


def _load_tokenizer(files: ModelFiles) -> Tokenizer:
    from aserve.tokenizer.load import load_tokenizer

    return load_tokenizer(files)


def _build_runner(config: EngineConfig, files: ModelFiles, compiler: GrammarCompiler) -> ModelRunner:
    from aserve.runner.ranks.build import build_ranks

    return build_ranks(config, files, compiler.eos_token_ids, compiler)


def run_in_thread(function: Callable[[], T], name: str) -> "Future[T]":
    """Call ``function`` in a thread of its own that does not keep the process alive."""
    future: Future[T] = Future()

    def call() -> None:
        future.set_running_or_notify_cancel()
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=call, name=name, daemon=True).start()
    return future

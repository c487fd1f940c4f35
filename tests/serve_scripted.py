"""A serving process on a scripted engine, for tests that send it signals: ``serve_scripted.py PORT [NAME=VALUE ...]``.

Settings besides those of the server: ``load_s`` for the time that loading takes, ``fail_step`` and ``stall_step`` for
the number of the step that fails or never completes, ``step_timeout_s`` of the engine.
"""

import sys
import time
from collections.abc import Sequence

from doubles_engine import EOS, LetterTokenizer

from aserve.config import Config, EngineConfig, ServerConfig
from aserve.engine.async_engine import AsyncEngine
from aserve.log import configure_logging
from aserve.runner.scripted import ScriptedRunner
from aserve.scheduler.limits import Limits
from aserve.server.serve import run_server

LIMITS = Limits(
    vocab_size=256, max_model_len=4096, max_num_seqs=64, max_num_batched_tokens=512, num_pages=4096, page_size=4
)


class ServedTokenizer(LetterTokenizer):
    """With what the server shows of tokens."""

    special_token_ids = frozenset({EOS})


class SlowToLoad(ScriptedRunner):
    """Takes its time to warm up."""

    load_s = 0.0

    def warm_up(self) -> None:
        time.sleep(self.load_s)


def cheap(tokens: Sequence[int], position: int) -> int:
    return 97 + position % 26


def main(port: str, *settings: str) -> int:
    values = {name: float(value) for name, _, value in (setting.partition("=") for setting in settings)}
    runner = SlowToLoad(LIMITS, cheap, step_time_s=0.01)
    runner.load_s = values.pop("load_s", 0.0)
    if "fail_step" in values:
        runner.fail_step(int(values.pop("fail_step")), RuntimeError("the device is gone"))
    if "stall_step" in values:
        runner.stall_from(int(values.pop("stall_step")))
    engine = EngineConfig(served_model_name="scripted", step_timeout_s=values.pop("step_timeout_s", 60.0))
    config = Config(engine=engine, server=ServerConfig(port=int(port), **values))  # type: ignore[arg-type]
    configure_logging("info")
    return run_server(config, AsyncEngine(engine, runner=runner, tokenizer=ServedTokenizer()))  # type: ignore[arg-type]


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

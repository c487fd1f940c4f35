"""``aserve chat`` on a scripted engine, for tests that send it signals.

The answer is, without end, the number of messages so far as a digit; a message "wait" holds the device for 2 s first,
which is told.
"""

import functools
import sys
import time
from collections.abc import Sequence

from doubles_engine import LetterTokenizer

from aserve.cli import main
from aserve.commands import chat
from aserve.engine.async_engine import AsyncEngine
from aserve.runner.scripted import ScriptedRunner
from aserve.scheduler.limits import Limits

LIMITS = Limits(
    vocab_size=256, max_model_len=4096, max_num_seqs=4, max_num_batched_tokens=512, num_pages=4096, page_size=4
)


def count_messages(tokens: Sequence[int], position: int) -> int:
    text = "".join(map(chr, tokens[:position]))
    if text.endswith("wait\n"):
        print("the device waits", flush=True)
        time.sleep(2)
    return ord("0") + text.count("\n")


if __name__ == "__main__":
    runner = ScriptedRunner(LIMITS, count_messages, step_time_s=0.005)
    chat.AsyncEngine = functools.partial(  # type: ignore[assignment, misc]
        AsyncEngine, runner=runner, tokenizer=LetterTokenizer()
    )
    sys.exit(main(["chat", *sys.argv[1:]]))

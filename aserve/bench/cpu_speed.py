"""``python -m aserve.bench.cpu_speed``: tokens per second on a CPU beside transformers and llama.cpp, in one run.

Each engine lives in a process of its own and idles while another is timed; rounds go through all of them in turn, so
that a machine that grows slower does so for all. Greedy, prompts of random token ids, new ones each round. llama.cpp
takes part if ``--node-folder`` names a folder where ``npm install node-llama-cpp`` was run.
"""

import argparse
import random
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import orjson

from aserve.bench.report import format_table
from aserve.config import EngineConfig
from aserve.gguf_header import read_gguf_header
from aserve.log import configure_logging
from aserve.model_files import ModelFiles, locate_model
from aserve.runner.cpu_cores import count_cores

NODE_SCRIPT = Path(__file__).with_name("llama_cpp_peer.mjs")
FIRST_ORDINARY_ID = 1000  # lower ones are control tokens and single bytes


class Peer:
    """One engine behind a pipe; see ``speed_peer`` for the lines that go through it."""

    def __init__(self, name: str, command: list[str], folder: Path | None = None) -> None:
        self.name = name
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=folder)

    def __enter__(self) -> "Peer":
        self._read()  # says that the model is loaded
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def measure(self, prompts: list[list[int]], output_len: int) -> float:
        """Return generated tokens per second of wall time, prefill included."""
        if self._process.stdin is None:
            raise RuntimeError(f"{self.name} has no standard input")
        self._process.stdin.write(orjson.dumps({"prompts": prompts, "output_len": output_len}) + b"\n")
        self._process.stdin.flush()
        result = self._read()
        if result["num_tokens"] != len(prompts) * output_len:
            raise RuntimeError(f"{self.name} made {result['num_tokens']} tokens, not {len(prompts)} x {output_len}")
        return float(result["num_tokens"] / result["seconds"])

    def _read(self) -> dict[str, Any]:
        line = self._process.stdout.readline() if self._process.stdout is not None else b""
        if not line:
            raise RuntimeError(f"{self.name} ended with status {self._process.wait()}")
        message: dict[str, Any] = orjson.loads(line)
        return message


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print a markdown table of medians and of aserve's ratios to the others."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="a .gguf file; default: the demo model")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32], help="default: 1 8 32", metavar="N")
    parser.add_argument("--rounds", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--input-len", type=int, default=128, help="tokens (default: %(default)s)")
    parser.add_argument("--output-len", type=int, default=128, help="tokens (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=count_cores()[0], help="of each engine (default: %(default)s)")
    parser.add_argument("--node-folder", type=Path, help="where node-llama-cpp is installed; default: no llama.cpp")
    parser.add_argument("--no-transformers", action="store_true", help="leave transformers out, which is slow")
    arguments = parser.parse_args(argv)
    configure_logging("warning")
    files = locate_model(EngineConfig(model=arguments.model))
    rates = _measure_all(arguments, files)
    print(format_table([_row(rates, streams) for streams in arguments.streams]))
    return 0


def _measure_all(arguments: argparse.Namespace, files: ModelFiles) -> dict[str, dict[int, list[float]]]:
    """Return engine -> streams -> tokens per second of each round."""
    vocab_size = len(read_gguf_header(files.path).metadata["tokenizer.ggml.tokens"])
    rates: dict[str, dict[int, list[float]]] = {}
    with _Peers(arguments, files) as peers:
        for round_idx in range(-1, arguments.rounds):  # the first one warms up
            for streams in arguments.streams:
                for peer in peers:
                    seed = round_idx * 1000 + streams
                    prompts = _random_prompts(streams, arguments.input_len, vocab_size, seed)
                    output_len = arguments.output_len if round_idx >= 0 else 8
                    rate = peer.measure(prompts, output_len)
                    if round_idx >= 0:
                        rates.setdefault(peer.name, {}).setdefault(streams, []).append(rate)
                        print(f"{peer.name} x {streams}: {rate:.1f} tok/s", file=sys.stderr, flush=True)
    return rates


class _Peers:
    """All engines of a run, started one after the other, so that none is timed while another loads."""

    def __init__(self, arguments: argparse.Namespace, files: ModelFiles) -> None:
        self._arguments = arguments
        self._model = str(files.path.resolve())
        self._started: list[Peer] = []

    def __enter__(self) -> list[Peer]:
        try:
            for name, command, folder in self._commands():
                self._started.append(Peer(name, command, folder))
                self._started[-1].__enter__()
        except BaseException as error:
            self.__exit__(type(error), error, error.__traceback__)
            raise
        return self._started

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for peer in self._started:
            peer.__exit__(kind, error, trace)

    def _commands(self) -> list[tuple[str, list[str], Path | None]]:
        threads = str(self._arguments.threads)
        python = [sys.executable, "-m", "aserve.bench.speed_peer"]
        commands: list[tuple[str, list[str], Path | None]] = [
            ("aserve", [*python, "aserve", self._model, threads], None)
        ]
        if not self._arguments.no_transformers:
            commands.append(("transformers", [*python, "transformers", self._model, threads], None))
        if self._arguments.node_folder is not None:
            folder = self._arguments.node_folder.resolve()
            commands.append(("llama.cpp", ["node", str(NODE_SCRIPT), self._model, threads], folder))
        return commands


def _random_prompts(count: int, length: int, vocab_size: int, seed: int) -> list[list[int]]:
    generator = random.Random(seed)
    return [[generator.randrange(FIRST_ORDINARY_ID, vocab_size) for _ in range(length)] for _ in range(count)]


def _row(rates: dict[str, dict[int, list[float]]], streams: int) -> dict[str, Any]:
    """Medians of the rates, and medians of the ratios within a round."""
    row: dict[str, Any] = {"streams": streams}
    for name, by_streams in rates.items():
        row[f"{name} tok/s"] = statistics.median(by_streams[streams])
    for name, by_streams in rates.items():
        if name != "aserve":
            ratios = [own / other for own, other in zip(rates["aserve"][streams], by_streams[streams], strict=True)]
            row[f"aserve / {name}"] = statistics.median(ratios)
    return row


if __name__ == "__main__":
    raise SystemExit(main())

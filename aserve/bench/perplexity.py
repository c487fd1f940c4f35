"""``python -m aserve.bench.perplexity``: what quantised weights, keys and values cost, as the perplexity of a text.

The text is cut into windows that do not overlap; every token of a window but its first is predicted from the ones
before it. The decoder, the attention backend and the operators are those that serve.
"""

import argparse
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from aserve.bench.report import format_table
from aserve.config import EngineConfig, load_config
from aserve.kernels.choose import choose_operators
from aserve.log import configure_logging
from aserve.model_files import ModelFiles, locate_model
from aserve.models.decoder import Decoder
from aserve.runner.assemble import assemble
from aserve.runner.executor import DeviceParts
from aserve.runner.lone_prompt import forward_prompt
from aserve.tokenizer.load import load_tokenizer
from aserve.weights.load import load_model

DEFAULT_TEXT = Path(__file__).resolve().parents[2] / "docs" / "data" / "python-reference.txt"
ROWS_AT_ONCE = 128  # bounds the logits in memory
PAGE_SIZE = 16


@dataclass(frozen=True, slots=True)
class PerplexityResult:
    """One pair of settings; ``change_percent`` is against the first one measured."""

    quantization: str
    kv_cache_dtype: str
    num_tokens: int  # predicted
    perplexity: float
    change_percent: float


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print a markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="as for aserve serve; default: the demo model")
    parser.add_argument(
        "--text", type=Path, default=DEFAULT_TEXT, help="UTF-8 file; default: that of this repository's docs"
    )
    parser.add_argument("--window", type=int, default=1024, help="tokens (default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, help="tokens of the text to use; default: all")
    parser.add_argument(
        "--quantization", nargs="+", default=["none", "int8"], help="in order (default: none int8)", metavar="NAME"
    )
    parser.add_argument(
        "--kv-cache-dtype", nargs="+", default=["auto"], help="each with each quantisation (default: auto)",
        metavar="NAME",
    )  # fmt: skip
    arguments = parser.parse_args(argv)
    try:
        text = arguments.text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        parser.error(f"cannot read the text, see --text: {error}")
    configure_logging("warning")
    files = locate_model(EngineConfig(model=arguments.model))
    token_ids = load_tokenizer(files).encode(text, add_special_tokens=False)[: arguments.max_tokens]
    results: list[PerplexityResult] = []
    for quantization, kv_cache_dtype in itertools.product(arguments.quantization, arguments.kv_cache_dtype):
        loss, num_tokens = measure_loss(files, quantization, token_ids, arguments.window, kv_cache_dtype)
        perplexity = math.exp(loss)
        first = results[0].perplexity if results else perplexity
        change_percent = 100 * (perplexity / first - 1)
        results.append(PerplexityResult(quantization, kv_cache_dtype, num_tokens, perplexity, change_percent))
    print(format_table([asdict(result) for result in results]))
    return 0


@torch.inference_mode()
def measure_loss(
    files: ModelFiles, quantization: str, token_ids: list[int], window: int, kv_cache_dtype: str = "auto"
) -> tuple[float, int]:
    """Return the mean negative log-likelihood in nats and the number of tokens it is over, in float32 on the CPU."""
    device = torch.device("cpu")
    operators = choose_operators(device)
    model = load_model(files, device=device, dtype=torch.float32, quantization=quantization, operators=operators).model
    sizes = {"max_num_seqs": 1, "page_size": PAGE_SIZE, "num_pages": -(-window // PAGE_SIZE), "max_model_len": window}
    config = load_config(overrides={"engine": {**sizes, "kv_cache_dtype": kv_cache_dtype}}).engine
    parts = assemble(config, files, model, operators, device, torch.float32)
    losses = [_window_loss(parts, piece) for piece in _windows(token_ids, window)]
    num_tokens = sum(count for _, count in losses)
    return sum(loss for loss, _ in losses) / num_tokens, num_tokens


def _windows(token_ids: list[int], window: int) -> Iterator[Tensor]:
    for start in range(0, len(token_ids) - 1, window):
        yield torch.tensor(token_ids[start : start + window])


def _window_loss(parts: DeviceParts, token_ids: Tensor) -> tuple[float, int]:
    """Return the summed loss of all tokens but the first, and their number."""
    hidden = forward_prompt(parts.model, token_ids, parts.backend, parts.layers_kv, parts.operators)[:-1]
    loss = 0.0
    for rows, targets in zip(torch.split(hidden, ROWS_AT_ONCE), torch.split(token_ids[1:], ROWS_AT_ONCE), strict=True):
        loss += _summed_loss(parts.model, rows, targets)
    return loss, len(hidden)


def _summed_loss(model: Decoder, hidden: Tensor, targets: Tensor) -> float:
    logits = model.compute_logits(hidden)
    return float(torch.nn.functional.cross_entropy(logits, targets, reduction="sum"))


if __name__ == "__main__":
    raise SystemExit(main())

"""``aserve generate``: prompts in, completions out, as JSON lines."""

import argparse
import contextlib
import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Literal, cast

import orjson

from aserve.commands.sampling import sampling_params
from aserve.config import Config
from aserve.engine.llm import LLM, CompletedOutput
from aserve.errors import ClientError
from aserve.request import SamplingParams

Prompt = str | list[int] | list[dict[str, Any]]
OVERRIDES = {setting.name for setting in dataclasses.fields(SamplingParams)}


def run(arguments: argparse.Namespace, config: Config) -> int:
    """Complete every prompt; returns 1 if one of them failed."""
    defaults = sampling_params(arguments)
    items = [{"prompt": prompt} for prompt in arguments.prompt]
    if arguments.input:
        with _open(arguments.input, "rb", sys.stdin.buffer) as source:
            items.extend(_read_items(source))
    if not items:
        raise ClientError("nothing to generate: give --prompt or --input")
    prompts = [_prompt(item) for item in items]
    params = [_params(item, defaults) for item in items]
    with LLM(config.engine) as llm, _open(arguments.output, "wb", sys.stdout.buffer) as target:
        outputs = llm.generate(prompts, params)
        for item, output in zip(items, outputs, strict=True):
            target.write(orjson.dumps(_line(item, output), option=orjson.OPT_APPEND_NEWLINE))
        target.flush()
    return int(any(output.error for output in outputs))


def _open(name: str, mode: Literal["rb", "wb"], standard: BinaryIO) -> contextlib.AbstractContextManager[BinaryIO]:
    """Open a file, or borrow a standard stream for '-'."""
    if name == "-":
        return contextlib.nullcontext(standard)
    try:
        return cast(BinaryIO, Path(name).open(mode))
    except OSError as error:
        raise ClientError(f"cannot open {name}: {error.strerror}") from error


def _read_items(source: BinaryIO) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(source, start=1):
        if not line.strip():
            continue
        try:
            item = orjson.loads(line)
        except orjson.JSONDecodeError as error:
            raise ClientError(f"line {number} is not JSON: {error}") from error
        if not isinstance(item, dict) or not ("prompt" in item or "messages" in item):
            raise ClientError(f"line {number} needs 'prompt' or 'messages'")
        yield item


def _prompt(item: dict[str, Any]) -> Prompt:
    prompt: Prompt = item["messages"] if "messages" in item else item["prompt"]
    return prompt


def _params(item: dict[str, Any], defaults: SamplingParams) -> SamplingParams:
    """Apply the sampling fields of one line, if any, over the flags."""
    given: dict[str, Any] = {name: value for name, value in item.items() if name in OVERRIDES and value is not None}
    if isinstance(given.get("stop"), str):
        given["stop"] = [given["stop"]]
    for name in ("stop", "stop_token_ids"):
        if name in given:
            given[name] = tuple(given[name])
    if "logit_bias" in given:
        given["logit_bias"] = {int(token): bias for token, bias in given["logit_bias"].items()}
    try:
        return dataclasses.replace(defaults, **given)
    except TypeError as error:
        raise ClientError(f"a sampling field has the wrong type: {error}") from error


def _line(item: dict[str, Any], output: CompletedOutput) -> dict[str, Any]:
    line = {key: item[key] for key in ("id", "custom_id") if key in item}
    if output.error:
        return line | {"error": output.error}
    return line | {
        "text": output.text,
        "token_ids": output.token_ids,
        "finish_reason": output.finish_reason,
        "num_prompt_tokens": output.num_prompt_tokens,
        "num_output_tokens": output.num_output_tokens,
        "num_cached_tokens": output.num_cached_tokens,
    }

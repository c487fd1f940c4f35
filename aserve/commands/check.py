"""``aserve check``: devices, attention backends and quantisation methods with reasons, versions."""

import argparse
import os
import platform
from importlib import metadata
from typing import Any

import orjson
import torch

from aserve import __version__
from aserve.attention.registry import refusals_here
from aserve.config import Config, cache_folder
from aserve.quantization.registry import QUANT_METHODS

PACKAGES = (
    "torch", "flashinfer-python", "flash-attn", "flash-attn-4", "triton", "transformers", "tokenizers", "safetensors",
    "gguf", "starlette", "uvicorn", "websockets", "uvloop", "orjson", "msgspec",
)  # fmt: skip


def run(arguments: argparse.Namespace, config: Config) -> int:
    """Print the report."""
    report = machine_report()
    print(orjson.dumps(report, option=orjson.OPT_INDENT_2).decode() if arguments.json else format_report(report))
    return 0


def machine_report() -> dict[str, Any]:
    """Collect what this machine offers; a refusal is the reason, None means usable."""
    return {
        "aserve": __version__,
        "python": platform.python_version(),
        "devices": {"cpu": f"{os.cpu_count()} cores, {platform.machine()}", **_gpus()},
        "attention_backends": refusals_here(),
        "quantization": QUANT_METHODS.refusals(),
        "versions": {name: _version(name) for name in PACKAGES},
        "cache_folder": str(cache_folder()),
    }


def _gpus() -> dict[str, str]:
    gpus = {}
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        capability = f"sm_{properties.major}{properties.minor}"
        gpus[f"cuda:{index}"] = f"{properties.name}, {capability}, {free >> 20} of {total >> 20} MiB free"
    return gpus


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def format_report(report: dict[str, Any]) -> str:
    """Lay the report out for a terminal."""
    lines = [f"aserve {report['aserve']} on Python {report['python']}, cache in {report['cache_folder']}"]
    for title in ("devices", "attention_backends", "quantization", "versions"):
        lines.append(f"\n{title.replace('_', ' ')}")
        for name, value in report[title].items():
            lines.append(f"  {name:<18} {_describe(title, value)}")
    return "\n".join(lines)


def _describe(title: str, value: str | None) -> str:
    if title == "versions":
        return value or "not installed"
    if title == "devices":
        return value or ""
    if not value:
        return "usable"
    return f"refused {value}" if value.startswith("for ") else f"refused: {value}"

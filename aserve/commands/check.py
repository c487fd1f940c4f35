"""``aserve check``: devices, attention backends, their variants and quantisation methods with reasons, versions.

With a model, also what of these serves it.
"""

import argparse
import os
import platform
from importlib import metadata
from typing import Any

import orjson
import torch

from aserve import __version__
from aserve.attention.registry import refusals_here
from aserve.commands.check_variants import list_variants, model_report
from aserve.config import Config, cache_folder
from aserve.quantization.registry import QUANT_METHODS
from aserve.runner.attention_problem import Gpu

PACKAGES = (
    "torch", "flashinfer-python", "flash-attn", "flash-attn-4", "triton", "transformers", "tokenizers", "safetensors",
    "gguf", "starlette", "uvicorn", "websockets", "uvloop", "orjson", "msgspec",
)  # fmt: skip


def run(arguments: argparse.Namespace, config: Config) -> int:
    """Print the report."""
    gpu = Gpu(*arguments.gpu) if arguments.gpu else _gpu_here()
    report = machine_report(gpu)
    if config.engine.model is not None:
        report["model"] = model_report(config.engine, gpu)
    print(orjson.dumps(report, option=orjson.OPT_INDENT_2).decode() if arguments.json else format_report(report))
    return 0


def machine_report(gpu: Gpu | None = None) -> dict[str, Any]:
    """Collect what this machine offers; a refusal is the reason, None means usable.

    Variants are those of ``gpu``.
    """
    return {
        "aserve": __version__,
        "python": platform.python_version(),
        "devices": {"cpu": f"{os.cpu_count()} cores, {platform.machine()}", **_gpus()},
        "attention_backends": refusals_here(),
        "cake_variants": list_variants(gpu),
        "quantization": QUANT_METHODS.refusals(),
        "versions": {name: _version(name) for name in PACKAGES},
        "cache_folder": str(cache_folder()),
    }


def _gpu_here() -> Gpu | None:
    return Gpu.of(torch.device("cuda")) if torch.cuda.is_available() else None


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
    for title in ("devices", "attention_backends", "cake_variants", "quantization", "versions"):
        lines += ["", title.replace("_", " "), *_rows(title, report[title])]
    if model := report.get("model"):
        lines += _format_model(model)
    return "\n".join(lines)


def _format_model(model: dict[str, Any]) -> list[str]:
    backends = _rows("attention_backends", model["attention_backends"])
    lines = ["", f"attention backends for {model['name']}", *backends, "", f"cake variants for {model['name']}"]
    if model["flash_infer_cake"] is None:
        lines.append("  decodes by FlashInfer's own cake kernels; otherwise by these")
    for layer in model["cake_layers"]:
        window = f", window {layer['window']}" if layer["window"] else ""
        lines.append(f"  {layer['heads']}{window}, {layer['kv_dtype']} keys with {layer['dtype']} queries")
        lines.append(f"    prefill: {layer['prefill']['summary']}")
        if layer["drafts"]:
            lines.append(f"    drafts: {layer['drafts']['summary']}")
        lines += [f"    decode: {step['summary']}" for step in layer["decode"]]
    return lines if model["cake_layers"] else [*lines, "  none: torch finds no CUDA device; --gpu names one"]


def _rows(title: str, values: dict[str, str | None]) -> list[str]:
    width = max(map(len, values), default=0) + 1
    return [f"  {name:<{max(width, 18)}} {_describe(title, value)}" for name, value in values.items()]


def _describe(title: str, value: str | None) -> str:
    if title == "versions":
        return value or "not installed"
    if title == "devices":
        return value or ""
    if not value:
        return "usable"
    return f"refused {value}" if value.startswith("for ") else f"refused: {value}"

"""All settings, their defaults, units and help texts: one frozen tree, made once.

Flags override the TOML file, the file overrides the defaults; unknown keys are errors. "auto" and
None are resolved once, where the value becomes known, and logged with the reason. Types and ranges are checked
wherever a section is made, from a file, from flags or in code. What the device decides (the number of pages, say) is
not a setting; see ``scheduler.limits.Limits``.
"""

import functools
import math
import os
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from aserve.builtin_models import BUILTIN_MODELS
from aserve.errors import ConfigError
from aserve.suggestion import did_you_mean

API_KEY_VARIABLE = "ASERVE_API_KEY"


def cache_folder() -> Path:
    """Return the folder for downloads and packed weights: $ASERVE_CACHE, else the user's cache folder."""
    if folder := os.environ.get("ASERVE_CACHE"):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "aserve"


def option(default: Any, help: str) -> Any:
    """Declare a setting with its default and the text that ``--help`` shows."""
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The model and how it is run."""

    model: str | None = option(None, "local folder, .gguf file or hub id; none serves the embedded demo model")
    revision: str | None = option(None, "branch, tag or commit of a hub id")
    random_weights: bool = option(
        False,
        "draw weights instead of reading them, to measure speed without a download; the model is then a folder with "
        f"config.json or one of {', '.join(BUILTIN_MODELS)}",
    )
    served_model_name: str | None = option(None, "name that clients use; default: the model's own")
    device: Literal["auto", "cpu", "cuda"] = option("auto", "where the model runs")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = option("auto", "type of weights and activations")
    quantization: Literal["auto", "none", "int8"] = option(
        "auto", "how linear layers store weights; auto: int8 for the demo model on a CPU, else none"
    )
    attention_backend: str = option("auto", "a backend, or 'prefill,decode' for a hybrid; see `aserve check`")
    cake_variants: tuple[str, ...] = option(
        (),
        "variants of the backend cake that must be used, one for a phase, such as decode-16-d128; see `aserve check`",
    )
    max_model_len: int | None = option(None, "tokens, prompt and output; default: the model's, cut to what fits")
    max_num_seqs: int | None = option(None, "sequences that run together; default: 32 on a CPU, 320 on a GPU")
    max_num_batched_tokens: int | None = option(
        None, "tokens that one step computes; default: 8192 on a GPU, on a CPU what takes less than 250 ms"
    )
    page_size: int | None = option(
        None, "tokens per KV page (of each rank), 1 to 256; default: 16 unless the attention backend needs another"
    )
    kv_cache_dtype: Literal["auto", "fp8", "nvfp4"] = option(
        "auto",
        "type of cached keys and values; auto: that of the model, fp8: e4m3 with scales, nvfp4: 4 bits",
    )
    cuda_graphs: bool = option(True, "capture the usual steps as CUDA graphs at start")
    kv_memory_gib: float | None = option(None, "GiB of KV pages; default: 1 on a CPU")
    kv_memory_fraction: float = option(0.9, "share of the GPU's memory for weights, graphs and KV pages")
    num_pages: int | None = option(None, "number of KV pages, instead of the two settings above")
    decode_context_parallel_size: int = option(
        1,
        "ranks, 1 to 8, each on a GPU of its own (on a CPU, in a process of its own), that share the KV of every "
        "sequence token by token, so that as many times more of it fits; each holds all weights",
    )
    prefix_cache: bool = option(True, "keep finished KV pages for prompts with the same beginning")
    kv_lease_fraction: float = option(
        0.5, "share of the KV pages that open conversations may keep until their next turn; they give way to requests"
    )
    speculation: Literal["none", "ngram"] = option(
        "none",
        "guess tokens ahead and verify them in one step, so that each is still the model's choice; ngram: what "
        "followed the same tokens before in the prompt or the output",
    )
    num_speculative_tokens: int = option(5, "tokens guessed ahead of a sequence, at most")
    ngram_max: int = option(4, "longest run of tokens that is looked up, before shorter ones")
    ngram_min: int = option(2, "shortest run of tokens that is looked up")
    overlap: bool = option(True, "prepare the next step while the device executes one")
    policy: Literal["fcfs", "priority"] = option("fcfs", "order in which waiting requests start")
    max_queued_requests: int = option(1024, "requests that may wait; more are refused with 503")
    num_threads: int | None = option(None, "compute threads on a CPU; default: cores of this machine or container")
    step_timeout_s: float = option(
        60.0, "seconds after which a step counts as stuck and /ready turns 503; /health after twice that"
    )
    trace_steps: int = option(256, "steps kept for the trace file that is written when the engine fails")
    trace_file: str | None = option(None, "where that trace goes; default: a file in the cache folder")

    def __post_init__(self) -> None:
        _check_section("engine", self)
        if self.ngram_min > self.ngram_max:
            raise ConfigError(f"engine.ngram_min must be at most ngram_max ({self.ngram_max}), got {self.ngram_min}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """The sockets and their limits."""

    host: str = option("127.0.0.1", "address to listen on")
    port: int = option(8000, "port to listen on; 0 takes a free one")
    api_key: str | None = option(
        None, f"key that clients must send (Bearer or X-Api-Key), HTTP and WebSocket; also {API_KEY_VARIABLE}"
    )
    allowed_origins: tuple[str, ...] = option((), "browser origins allowed besides the server's own; '*' allows all")
    tool_call_parser: str = option(
        "auto",
        "how the model writes tool calls: hermes, qwen3_coder, llama3_json, mistral, pythonic, deepseek, harmony or "
        "none; auto: by its chat template",
    )
    reasoning_parser: str = option(
        "auto", "how the model marks reasoning: think, mistral, harmony or none; auto: by its chat template"
    )
    max_body_mib: float = option(16.0, "MiB of one request body")
    max_frame_mib: float = option(16.0, "MiB of one WebSocket message")
    ws_deflate: bool = option(
        False, "compress WebSocket messages where clients offer it; costs memory a connection and time a token"
    )
    keep_alive_s: float = option(15.0, "seconds of silence after which a stream gets a keep-alive comment; 0: never")
    stall_timeout_s: float = option(30.0, "seconds a client may leave its stream unread before it is cut off")
    drain_timeout_s: float = option(10.0, "seconds that running requests get after SIGTERM")
    max_connection_age_s: float = option(3600.0, "seconds a WebSocket may live")
    response_store: str = option(
        "memory", "where stored responses are kept: memory, sqlite:///PATH, or redis://HOST:PORT/DB"
    )
    response_store_mib: float = option(256.0, "MiB of stored responses; the oldest are dropped")
    response_max_age_s: float = option(30 * 86400.0, "seconds that a stored response is kept")
    resume_grace_s: float = option(
        60.0, "seconds that a resumable response runs on without its client, and that its events can be read again"
    )
    log_level: Literal["debug", "info", "warning", "error"] = option("info", "log level")

    def __post_init__(self) -> None:
        _check_section("server", self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Everything; sections as in the TOML file."""

    engine: EngineConfig = field(default_factory=EngineConfig)
    server: ServerConfig = field(default_factory=ServerConfig)


SECTIONS: dict[str, type] = {"engine": EngineConfig, "server": ServerConfig}


def load_config(path: str | Path | None = None, overrides: Mapping[str, Mapping[str, Any]] | None = None) -> Config:
    """Merge defaults, the TOML file at ``path`` and ``overrides`` (section -> key -> value).

    Raises ConfigError for an unreadable file, an unknown section or key, or a value of the wrong type or range.
    """
    values: dict[str, dict[str, Any]] = {name: {} for name in SECTIONS}
    for source in (_read_toml(path) if path else {}, overrides or {}):
        for section, settings in source.items():
            if section not in SECTIONS:
                raise ConfigError(f"unknown section [{section}]{_suggest_section(section)}")
            if not isinstance(settings, Mapping):
                raise ConfigError(f"[{section}] must be a table of settings, got {settings!r}")
            values[section].update(settings)
    return Config(**{name: _build(cls, name, values[name]) for name, cls in SECTIONS.items()})


def _read_toml(path: str | Path) -> dict[str, Any]:
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"cannot read the config file {path}: {error}") from error


def _build(cls: type, section: str, values: Mapping[str, Any]) -> Any:
    if unknown := sorted(set(values) - set(_types_of(section))):
        known = _types_of(section)
        hint = did_you_mean(unknown[0], known) or f"; known: {', '.join(known)}"
        raise ConfigError(f"unknown setting {section}.{unknown[0]}{hint}")
    return cls(**values)


def _suggest_section(name: str) -> str:
    """Say which section was meant, or in which one a setting belongs that stands in none."""
    places = {key: f"; it belongs in [{section}]" for section in SECTIONS for key in _types_of(section)}
    return places.get(name) or did_you_mean(name, SECTIONS) or f"; known: {', '.join(SECTIONS)}"


@functools.cache
def _types_of(section: str) -> dict[str, Any]:
    return get_type_hints(SECTIONS[section])


POSITIVE = {
    "max_model_len", "max_num_seqs", "max_num_batched_tokens", "kv_memory_gib", "num_pages", "max_queued_requests",
    "num_threads", "step_timeout_s", "trace_steps", "max_body_mib", "max_frame_mib", "stall_timeout_s",
    "max_connection_age_s", "response_store_mib", "response_max_age_s", "resume_grace_s",
}  # fmt: skip
NOT_NEGATIVE = {"keep_alive_s", "drain_timeout_s"}
BETWEEN = {
    "page_size": (1, 256), "decode_context_parallel_size": (1, 8), "port": (0, 65535),
    "num_speculative_tokens": (2, 64), "ngram_max": (1, 64), "ngram_min": (1, 64),
}  # fmt: skip


def _check_section(section: str, config: Any) -> None:
    """Check every field and store it in its own type (a list as a tuple, an int as a float); raises ConfigError."""
    for key, hint in _types_of(section).items():
        value = _check_type(f"{section}.{key}", getattr(config, key), hint)
        if value is not None:
            _check_range(f"{section}.{key}", key, value)
        object.__setattr__(config, key, value)  # frozen for everybody else


def _check_type(name: str, value: Any, hint: Any) -> Any:
    """Return ``value`` as ``hint`` wants it, or raise ConfigError."""
    if get_origin(hint) in (Union, UnionType):
        if value is None:
            return None
        hint = next(arg for arg in get_args(hint) if arg is not type(None))
    if get_origin(hint) is Literal:
        if value not in get_args(hint):
            raise ConfigError(f"{name} must be one of {', '.join(map(str, get_args(hint)))}, got {value!r}")
        return value
    if get_origin(hint) is tuple:
        if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
            raise ConfigError(f"{name} must be a list of strings, got {value!r}")
        return tuple(value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value) if abs(value) < 2**63 else math.inf
    if hint is str and isinstance(value, Path):
        return str(value)
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        raise ConfigError(f"{name} must be of type {hint.__name__}, got {value!r}")
    return value


def _check_range(name: str, key: str, value: Any) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{name} must be a finite number, got {value!r}")
    if key in POSITIVE and not value > 0:
        raise ConfigError(f"{name} must be positive, got {value!r}")
    if key in NOT_NEGATIVE and value < 0:
        raise ConfigError(f"{name} must not be negative, got {value!r}")
    if key in BETWEEN and not BETWEEN[key][0] <= value <= BETWEEN[key][1]:
        raise ConfigError(f"{name} must be between {BETWEEN[key][0]} and {BETWEEN[key][1]}, got {value!r}")
    if key == "kv_lease_fraction" and not 0 <= value <= 1:
        raise ConfigError(f"{name} must be in [0, 1], got {value!r}")
    if key == "kv_memory_fraction" and not 0 < value <= 1:
        raise ConfigError(f"{name} must be in (0, 1], got {value!r}")


def setting_fields(section: str) -> list[tuple[Field[Any], Any]]:
    """Return ``(field, type)`` of each setting of a section, in order; the command line is built from it."""
    hints = _types_of(section)
    return [(setting, hints[setting.name]) for setting in fields(SECTIONS[section]) if setting.default is not MISSING]

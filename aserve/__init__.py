"""aserve: an asyncio-native LLM serving engine.

The public names are imported on first use, so that ``import aserve`` stays light (no torch).
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aserve.config import EngineConfig as EngineConfig
    from aserve.engine.async_engine import AsyncEngine as AsyncEngine
    from aserve.engine.llm import LLM as LLM
    from aserve.request import RequestOutput as RequestOutput
    from aserve.request import SamplingParams as SamplingParams
    from aserve.server.local_client import LocalClient as LocalClient

__version__ = "0.1.0"

_HOMES = {
    "AsyncEngine": "aserve.engine.async_engine",
    "EngineConfig": "aserve.config",
    "LLM": "aserve.engine.llm",
    "LocalClient": "aserve.server.local_client",
    "RequestOutput": "aserve.request",
    "SamplingParams": "aserve.request",
}

__all__ = ["LLM", "AsyncEngine", "EngineConfig", "LocalClient", "RequestOutput", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'aserve' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)

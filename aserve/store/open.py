"""From a URL to a store."""

from pathlib import Path
from urllib.parse import unquote, urlsplit

from aserve.errors import ConfigError
from aserve.store.memory import MemoryStore
from aserve.store.record import ResponseStore
from aserve.store.sqlite import SqliteStore


def open_store(url: str, *, max_bytes: int, max_age_s: float) -> ResponseStore:
    """Return the store that ``url`` names: ``memory``, or ``sqlite:///PATH`` with an absolute or relative path.

    ``sqlite:///kept.db`` is a file in the working folder, ``sqlite:////var/kept.db`` one at the root. Raises
    ConfigError for any other URL, and for a file that cannot be used.
    """
    if url == "memory":
        return MemoryStore(max_bytes, max_age_s)
    parts = urlsplit(url)
    if parts.scheme in ("redis", "rediss"):
        raise ConfigError("responses cannot be kept in Redis: this server has no client for it; use sqlite:///PATH")
    if parts.scheme != "sqlite" or parts.netloc or not parts.path.strip("/"):
        raise ConfigError(f"the response store is 'memory' or 'sqlite:///PATH', got {url!r}")
    return SqliteStore(Path(unquote(parts.path[1:])), max_bytes, max_age_s)

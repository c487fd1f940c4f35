"""From a URL to a store."""

from pathlib import Path
from urllib.parse import unquote, urlsplit

from aserve.errors import ConfigError
from aserve.store.memory import MemoryStore
from aserve.store.record import ResponseStore
from aserve.store.sqlite import SqliteStore


def open_store(url: str, *, max_bytes: int, max_age_s: float) -> ResponseStore:
    """Return the store that ``url`` names: ``memory``, ``sqlite:///PATH`` with an absolute or relative path, or Redis.

    ``sqlite:///kept.db`` is a file in the working folder, ``sqlite:////var/kept.db`` one at the root.
    ``redis://HOST:PORT/DB`` may have a user and a password before the host; with TLS it is ``rediss``. Raises
    ConfigError for any other URL, for a file that cannot be used and for a Redis that does not answer.
    """
    if url == "memory":
        return MemoryStore(max_bytes, max_age_s)
    parts = urlsplit(url)
    if parts.scheme in ("redis", "rediss"):
        return _open_redis(url, max_bytes, max_age_s)
    if parts.scheme != "sqlite" or parts.netloc or not parts.path.strip("/"):
        raise ConfigError(f"the response store is 'memory', 'sqlite:///PATH' or 'redis://HOST:PORT/DB', got {url!r}")
    return SqliteStore(Path(unquote(parts.path[1:])), max_bytes, max_age_s)


def _open_redis(url: str, max_bytes: int, max_age_s: float) -> ResponseStore:
    try:
        from aserve.store.redis_store import open_redis
    except ModuleNotFoundError as error:
        raise ConfigError("responses in Redis need its client: pip install redis") from error
    return open_redis(url, max_bytes, max_age_s)

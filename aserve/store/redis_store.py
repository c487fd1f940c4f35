"""Responses in Redis, which survive a restart and are shared by servers of several hosts.

    {aserve:1}:response:ID   when it was put and the response, msgpack; Redis forgets it by itself when it is too old
    {aserve:1}:ages          sorted set of the ids, by when they were put
    {aserve:1}:sizes         hash of the bytes that each counts
    {aserve:1}:total         their sum

The braces keep all of them on one node of a cluster. What changes several of them is a script, so that servers do not
get in each other's way.
"""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast
from urllib.parse import urlsplit

import msgspec
from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as LostError
from redis.exceptions import RedisError
from redis.exceptions import TimeoutError as SilentError
from redis.retry import Retry

from aserve.errors import ConfigError
from aserve.store.record import StoredResponse
from aserve.store.unavailable import store_unavailable

logger = logging.getLogger(__name__)

OPTIONS: dict[str, Any] = {  # those of the URL win: ?socket_timeout=2
    "socket_connect_timeout": 2.0,
    "socket_timeout": 5.0,  # seconds, too
    "health_check_interval": 30,  # a connection that was idle for so many seconds is tried before it is used
    "retry": Retry(NoBackoff(), 1),  # for one that was closed while it was idle
}
PAUSE_S = 1.0  # in which a Redis that was lost is not asked again, so that nobody waits for a timeout each time

PREFIX = b"{aserve:1}:"  # the number is the version of what is kept
RESPONSE = PREFIX + b"response:"
INDEX = (PREFIX + b"ages", PREFIX + b"sizes", PREFIX + b"total")

DROP = """
local function drop(id)
  redis.call('DECRBY', KEYS[3], redis.call('HGET', KEYS[2], id) or 0)
  redis.call('HDEL', KEYS[2], id)
  redis.call('ZREM', KEYS[1], id)
  return redis.call('DEL', ARGV[1] .. id)
end
"""
PUT = f"""{DROP}
local prefix, id, value, ttl_ms, num_bytes, now, oldest, max_bytes = unpack(ARGV)
drop(id)
if redis.call('ZCARD', KEYS[1]) == 0 then
  redis.call('DEL', KEYS[2], KEYS[3])
end
redis.call('SET', prefix .. id, value, 'PX', ttl_ms)
redis.call('ZADD', KEYS[1], now, id)
redis.call('HSET', KEYS[2], id, num_bytes)
redis.call('INCRBY', KEYS[3], num_bytes)
for _, old in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', '(' .. oldest, 'LIMIT', 0, 1000)) do
  drop(old)
end
while tonumber(redis.call('GET', KEYS[3])) > tonumber(max_bytes) do
  local old = redis.call('ZRANGE', KEYS[1], 0, 0)[1]
  if not old then break end
  drop(old)
end
"""
DELETE = f"{DROP} return drop(ARGV[2])"

Kept = tuple[float, StoredResponse]
encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(Kept).decode


class RedisStore:
    """One database of a Redis; raises CapacityError while it cannot be reached."""

    blocks = True

    def __init__(
        self,
        client: Redis,
        place: str,
        max_bytes: int,
        max_age_s: float,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """``place`` says where it is, for the log."""
        self._client = client
        self._place = place
        self._max_bytes = max_bytes
        self._max_age_s = max_age_s
        self._clock = clock
        self._retry_at_s = 0.0  # by the monotonic clock
        self._is_lost = False
        self._put = client.register_script(PUT)
        self._delete = client.register_script(DELETE)

    def put(self, response: StoredResponse) -> None:
        """Keep ``response``, in place of one with the same id, and drop what is too old or too much."""
        now = self._clock()
        value = encode((now, response))
        with self._asking():
            self._put(
                keys=INDEX,
                args=(
                    RESPONSE,
                    _name(response.response_id),
                    value,
                    max(1, int(self._max_age_s * 1000)),
                    response.num_bytes,
                    now,
                    now - self._max_age_s,
                    self._max_bytes,
                ),
            )

    def get(self, response_id: str) -> StoredResponse | None:
        """Return the response, None if it is not here or too old."""
        with self._asking():
            value = self._client.get(RESPONSE + _name(response_id))
        if value is None:
            return None
        put_s, response = decode(cast(bytes, value))
        return response if put_s >= self._clock() - self._max_age_s else None

    def delete(self, response_id: str) -> bool:
        """Forget the response; False if there was none."""
        with self._asking():
            return bool(self._delete(keys=INDEX, args=(RESPONSE, _name(response_id))))

    def close(self) -> None:
        """Close the connection. Idempotent."""
        self._client.close()

    @contextmanager
    def _asking(self) -> Iterator[None]:
        if time.monotonic() < self._retry_at_s:
            raise store_unavailable()
        try:
            yield
        except RedisError as error:
            if isinstance(error, LostError | SilentError):
                self._retry_at_s = time.monotonic() + PAUSE_S
            if not self._is_lost:
                logger.error("%s does not keep responses at present: %s", self._place, error)
            self._is_lost = True
            raise store_unavailable() from error
        if self._is_lost:
            logger.info("%s keeps responses again", self._place)
            self._is_lost = False


def open_redis(url: str, max_bytes: int, max_age_s: float) -> RedisStore:
    """Return the store at ``url``, which was asked whether it is there; raises ConfigError if it is not."""
    parts = urlsplit(url)
    place = f"the Redis at {parts.hostname}"  # never the password
    try:
        if parts.hostname is None:
            raise ValueError("it names no host")
        place += f":{parts.port or 6379}"
        client = Redis.from_url(url, **OPTIONS)
        client.ping()
    except (ValueError, TypeError, OSError, RedisError) as error:
        raise ConfigError(f"cannot keep responses in {place}: {error}") from error
    return RedisStore(client, place, max_bytes, max_age_s)


def _name(response_id: str) -> bytes:
    return response_id.encode(errors="surrogatepass")  # ids come from clients

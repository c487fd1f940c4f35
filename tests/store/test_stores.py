"""Every store keeps, replaces, forgets and bounds responses; SQLite and Redis over a restart and for several, too."""

import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from doubles_redis import RedisServer
from redis import Redis

from aserve.errors import CapacityError, ConfigError
from aserve.store.memory import MemoryStore
from aserve.store.open import open_store
from aserve.store.record import OVERHEAD_BYTES, ResponseStore, StoredResponse
from aserve.store.redis_store import RedisStore
from aserve.store.sqlite import SqliteStore


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


MakeStore = Callable[[int, float], ResponseStore]


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(params=["memory", "sqlite", "redis"])
def make(request: pytest.FixtureRequest, tmp_path: Path, clock: Clock, redis_server: RedisServer) -> MakeStore:
    def make(max_bytes: int, max_age_s: float) -> ResponseStore:
        if request.param == "memory":
            return MemoryStore(max_bytes, max_age_s, clock)
        if request.param == "sqlite":
            return SqliteStore(tmp_path / "folder" / "kept.db", max_bytes, max_age_s, clock)
        return RedisStore(Redis.from_url(redis_server.url), "here", max_bytes, max_age_s, clock)

    return make


def response(name: str, size: int = 10) -> StoredResponse:
    return StoredResponse(name, 7, b"b" * size, b"[1]", "[\u0159]".encode(), b"[]")


def test_what_is_put_is_found_until_it_is_deleted(make: MakeStore) -> None:
    store = make(10**6, 100)
    assert store.get("a") is None
    store.put(response("a"))
    store.put(response("b"))
    assert store.get("a") == response("a")
    store.put(response("a", 20))
    assert store.get("a") == response("a", 20)
    assert store.delete("a") is True
    assert store.delete("a") is False
    assert store.get("a") is None
    assert store.get("b") == response("b")
    store.close()
    store.close()


def test_old_ones_are_not_found_any_more(make: MakeStore, clock: Clock) -> None:
    store = make(10**6, 100)
    store.put(response("a"))
    clock.now += 60
    store.put(response("b"))
    clock.now += 41
    assert store.get("a") is None
    assert store.get("b") is not None
    store.close()


def test_the_oldest_go_when_there_is_too_much(make: MakeStore, clock: Clock) -> None:
    size = response("a").num_bytes
    store = make(3 * size, 1e9)
    for name in "abcde":
        clock.now += 1
        store.put(response(name))
    assert [name for name in "abcde" if store.get(name)] == ["c", "d", "e"]
    clock.now += 1
    store.put(response("c"))  # is the newest now
    clock.now += 1
    store.put(response("f"))
    assert [name for name in "cdef" if store.get(name)] == ["c", "e", "f"]
    clock.now += 1
    store.put(response("huge", 4 * size))
    assert store.get("huge") is None
    store.close()
    assert size > OVERHEAD_BYTES


def test_names_that_no_response_has_are_not_found(make: MakeStore) -> None:
    store = make(10**6, 100)
    store.put(response("a"))
    for name in ("", "a\0", "A", "*", "../a", "x" * 10_000):
        assert store.get(name) is None
        assert store.delete(name) is False
    assert store.get("a") == response("a")
    store.close()


def test_memory_is_given_back(clock: Clock) -> None:
    store = MemoryStore(10**4, 100, clock)
    for number in range(1000):
        store.put(response(f"r{number}", number))
        assert store.num_bytes <= 10**4
    clock.now += 101
    assert store.get("r999") is None
    assert (len(store), store.num_bytes) == (0, 0)


def test_sqlite_survives_a_restart_and_is_shared(tmp_path: Path) -> None:
    path = tmp_path / "kept.db"
    first, second = (SqliteStore(path, 10**6, 100) for _ in range(2))
    first.put(response("a"))
    assert second.get("a") == response("a")
    first.close()
    second.close()
    again = SqliteStore(path, 10**6, 100)
    assert again.get("a") == response("a")
    again.close()


def test_redis_is_shared_and_its_own_limits_hold(redis_server: RedisServer) -> None:
    size = response("a0", 1000).num_bytes
    first, second = (open_store(redis_server.url, max_bytes=10 * size, max_age_s=60) for _ in range(2))

    def fill(store: ResponseStore, name: str) -> None:
        for number in range(100):
            store.put(response(f"{name}{number % 10}", 1000))
            if number % 7 == 0:
                store.delete(f"{name}{number % 10}")

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(fill, (first, second), "ab"))
    kept = [name for name in (f"{letter}{number}" for letter in "ab" for number in range(10)) if first.get(name)]
    assert kept == [
        name for name in (f"{letter}{number}" for letter in "ab" for number in range(10)) if second.get(name)
    ]
    assert 0 < len(kept) <= 10
    with Redis.from_url(redis_server.url) as client:
        keys = set(client.keys())
        assert {f"{{aserve:1}}:response:{name}".encode() for name in kept} <= keys
        assert len(keys) == len(kept) + 3
        assert client.get(b"{aserve:1}:total") == b"%d" % (len(kept) * size)
        assert client.zcard(b"{aserve:1}:ages") == client.hlen(b"{aserve:1}:sizes") == len(kept)
        assert 0 < client.pttl(f"{{aserve:1}}:response:{kept[0]}") <= 60_000
        for key in (b"ages", b"sizes"):  # as an eviction by Redis itself may do
            client.delete(b"{aserve:1}:" + key)
    for number in range(20):
        second.put(response(f"c{number}", 1000))
    assert sum(first.get(f"c{number}") is not None for number in range(20)) in range(9, 11)
    first.close()
    second.close()


def test_a_redis_that_does_not_answer_stops_the_start_without_its_password(redis_server: RedisServer) -> None:
    for url in ("redis://:secret@127.0.0.1:1/0", "redis://:secret@:6379", "redis://x:secret@127.0.0.1:99999"):
        with pytest.raises(ConfigError, match="cannot keep responses in the Redis at") as caught:
            open_store(url, max_bytes=1, max_age_s=1)
        assert "secret" not in str(caught.value)


def test_urls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for url, path in ((f"sqlite:///{tmp_path}/a%20b.db", tmp_path / "a b.db"), ("sqlite:///c.db", tmp_path / "c.db")):
        store = open_store(url, max_bytes=10**6, max_age_s=10)
        assert isinstance(store, SqliteStore)
        assert path.exists()
        store.close()
    assert isinstance(open_store("memory", max_bytes=1, max_age_s=1), MemoryStore)


@pytest.mark.parametrize(
    "url", ["", "disk", "sqlite://", "sqlite:///", "sqlite://host/a.db", "redis:///0", "file:///a"]
)
def test_other_urls_are_refused(url: str) -> None:
    with pytest.raises(ConfigError, match=r"response store|Redis"):
        open_store(url, max_bytes=1, max_age_s=1)


def test_a_file_of_something_else_is_left_alone(tmp_path: Path) -> None:
    other, text = tmp_path / "other.db", tmp_path / "text.db"
    database = sqlite3.connect(other)
    database.execute("CREATE TABLE precious (a)")
    database.commit()
    database.close()
    text.write_text("no database " * 100)
    for path in (other, text, tmp_path):
        with pytest.raises(ConfigError, match="cannot keep responses"):
            SqliteStore(path, 1, 1)
    assert text.read_text() == "no database " * 100


def test_a_file_that_breaks_is_told_apart_from_a_response_that_is_not_there(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "a.db", 10**6, 10)
    store.put(response("resp_1"))
    other = sqlite3.connect(tmp_path / "a.db")
    other.execute("DROP TABLE responses")
    other.commit()
    for use in (lambda: store.get("resp_1"), lambda: store.delete("resp_1"), lambda: store.put(response("resp_2"))):
        with pytest.raises(CapacityError, match="store of responses") as caught:
            use()
        assert caught.value.retry_after_s
    other.close()
    store.close()

"""Responses in an SQLite file, which survive a restart and may be shared by the processes of one host."""

import logging
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from aserve.errors import ConfigError
from aserve.store.record import COLUMNS, StoredResponse
from aserve.store.unavailable import store_unavailable

logger = logging.getLogger(__name__)

VERSION = 1  # of the table; a file of another version is not touched
BUSY_TIMEOUT_S = 10.0
TABLE = """
CREATE TABLE IF NOT EXISTS responses (
    response_id TEXT PRIMARY KEY, created_s INTEGER NOT NULL, body BLOB NOT NULL, input BLOB NOT NULL,
    conversation BLOB NOT NULL, spans BLOB NOT NULL, put_s REAL NOT NULL, num_bytes INTEGER NOT NULL
);
CREATE INDEX IF NOT EXISTS responses_by_age ON responses (put_s);
"""
SELECT = f"SELECT {', '.join(COLUMNS)} FROM responses WHERE response_id = ? AND put_s >= ?"
INSERT = f"INSERT OR REPLACE INTO responses ({', '.join(COLUMNS)}, put_s, num_bytes) VALUES (?, ?, ?, ?, ?, ?, ?, ?)"
DELETE_EXPIRED = "DELETE FROM responses WHERE put_s < ?"
# The newest ones that fit stay: the sum runs from the newest to the oldest.
DELETE_BEYOND = """
DELETE FROM responses WHERE response_id IN (
    SELECT response_id FROM (
        SELECT response_id, SUM(num_bytes) OVER (ORDER BY put_s DESC, rowid DESC) AS total FROM responses
    ) WHERE total > ?
)
"""


class SqliteStore:
    """One file in write-ahead mode; raises CapacityError while it cannot be used.

    The start raises ConfigError if the file cannot be opened or belongs to something else.
    """

    blocks = True

    def __init__(self, path: Path, max_bytes: int, max_age_s: float, clock: Callable[[], float] = time.time) -> None:
        self._max_bytes = max_bytes
        self._max_age_s = max_age_s
        self._clock = clock
        self._path = path
        self._num_bytes = 0  # as far as this process knows; what others add is found when it looks
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._database = sqlite3.connect(path, BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False)
            self._prepare()
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(f"cannot keep responses in {path}: {error}") from error

    def put(self, response: StoredResponse) -> None:
        """Keep ``response``, in place of one with the same id, and drop what is too old or too much."""
        values = [getattr(response, name) for name in COLUMNS]
        now = self._clock()
        with self._asking(), self._writing():
            self._database.execute(INSERT, (*values, now, response.num_bytes))
            self._database.execute(DELETE_EXPIRED, (now - self._max_age_s,))
            self._num_bytes += response.num_bytes
            if self._num_bytes > self._max_bytes:
                self._database.execute(DELETE_BEYOND, (self._max_bytes,))
                self._num_bytes = self._count_bytes()

    def get(self, response_id: str) -> StoredResponse | None:
        """Return the response, None if it is not here or too old."""
        with self._asking():
            row = self._database.execute(SELECT, (response_id, self._clock() - self._max_age_s)).fetchone()
        return None if row is None else StoredResponse(*row)

    def delete(self, response_id: str) -> bool:
        """Forget the response; False if there was none."""
        with self._asking():
            return self._database.execute("DELETE FROM responses WHERE response_id = ?", (response_id,)).rowcount > 0

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._database.close()

    @contextmanager
    def _asking(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:  # locked for too long, a full disk, a file that was damaged or taken away
            logger.error("%s does not keep responses at present: %s", self._path, error)
            raise store_unavailable() from error

    @contextmanager
    def _writing(self) -> Iterator[None]:
        self._database.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._database.execute("ROLLBACK")
            raise
        self._database.execute("COMMIT")

    def _prepare(self) -> None:
        (version,) = self._database.execute("PRAGMA user_version").fetchone()
        (num_tables,) = self._database.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()
        if version != VERSION and (version or num_tables):
            raise sqlite3.DatabaseError("it is a database of something else, or of another version")
        self._database.execute("PRAGMA journal_mode = WAL")
        self._database.execute("PRAGMA synchronous = NORMAL")
        self._database.executescript(TABLE)
        self._database.execute(f"PRAGMA user_version = {VERSION}")
        self._num_bytes = self._count_bytes()

    def _count_bytes(self) -> int:
        (total,) = self._database.execute("SELECT COALESCE(SUM(num_bytes), 0) FROM responses").fetchone()
        return int(total)

"""Disk cache of results by request, so that a second evaluation of a checkpoint runs no forward pass."""

import hashlib
import json
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from gristmill.foundation.errors import InputError

T = TypeVar("T")
DAMAGE = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR)  # the last: no such table or column
LOCK_TIMEOUT_SECONDS = 60.0  # for another process that is writing


class RequestCache:
    """One SQLite file for one model in one precision: the caller's name for it must say both.

    The key is a digest of token ids and settings, so a changed task, prompt or tokenizer misses the cache. A damaged
    file is replaced and reported to `say`; a file that cannot be opened raises InputError."""

    def __init__(self, path: Path, say: Callable[[str], None] = lambda sentence: None):
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path, self.say = path, say
        self._connection = self._opened()

    def _opened(self) -> sqlite3.Connection:
        for last in (False, True):
            connection = None
            try:
                connection = sqlite3.connect(self.path, timeout=LOCK_TIMEOUT_SECONDS)
                connection.execute("CREATE TABLE IF NOT EXISTS answers (question BLOB PRIMARY KEY, answer TEXT)")
                connection.execute("SELECT question, answer FROM answers LIMIT 1")
                return connection
            except sqlite3.DatabaseError as error:
                if connection is not None:
                    connection.close()
                if last:
                    raise self._unusable(error) from error
                self._remove(error)
        raise AssertionError("the second pass returns or raises")

    def _unusable(self, error: Exception) -> InputError:
        return InputError(
            f"{self.path}: the request cache cannot be written here ({error}); remove it, or free disk space"
        )

    def _remove(self, error: sqlite3.DatabaseError) -> None:
        """Removes a damaged file. Raises InputError if the cause is a full disk or another writing process instead."""
        if error.sqlite_errorcode not in DAMAGE or not self.path.is_file():
            raise self._unusable(error) from error
        self.say(f"{self.path}: the request cache is damaged ({error}) and is replaced by an empty one")
        self.path.unlink()

    def _safely(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Runs the query; if the file is damaged, once more on an empty one."""
        try:
            return work(self._connection)
        except sqlite3.DatabaseError as error:
            self._connection.close()
            self._remove(error)
            self._connection = self._opened()
            return work(self._connection)

    def find(self, questions: Sequence[bytes]) -> dict[bytes, Any]:
        """Cached results by request digest: pairs, as `add` takes them. Other values are ignored."""

        def look_up(connection: sqlite3.Connection) -> dict[bytes, Any]:
            known = {}
            for question in dict.fromkeys(questions):
                row = connection.execute("SELECT answer FROM answers WHERE question = ?", (question,)).fetchone()
                answer = None if row is None else _pair(row[0])
                if answer is not None:
                    known[question] = answer
            return known

        return self._safely(look_up)

    def add(self, answers: Mapping[bytes, Any]) -> None:
        rows = [(question, json.dumps(answer)) for question, answer in answers.items()]

        def write(connection: sqlite3.Connection) -> None:
            with connection:
                connection.executemany("INSERT OR REPLACE INTO answers VALUES (?, ?)", rows)

        self._safely(write)

    def close(self) -> None:
        self._connection.close()


def _pair(text: Any) -> list[Any] | None:
    """[log-probability, is it the argmax?] or [text, was it truncated?]."""
    try:
        answer = json.loads(text)
    except (ValueError, TypeError):
        return None
    whole = isinstance(answer, list) and len(answer) == 2
    return answer if whole and isinstance(answer[0], float | str) and isinstance(answer[1], bool) else None


def request_digest(kind: str, *parts: Any) -> bytes:
    """SHA-256 of a request; parts are JSON values."""
    return hashlib.sha256(json.dumps([kind, *parts]).encode()).digest()

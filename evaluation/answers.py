"""Answers a model has given before, on disk, so that a second evaluation of the same checkpoint asks nothing."""

import hashlib
import json
import sqlite3
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gristmill.data_pipeline.errors import InputError


class AnswerCache:
    """One SQLite file for one model in one precision: the caller's name for it must say both.

    A question is its token ids and how they are asked, so a changed task, prompt or tokenizer asks anew."""

    def __init__(self, path: Path):
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        try:
            self._connection = sqlite3.connect(path)
            self._connection.execute("CREATE TABLE IF NOT EXISTS answers (question BLOB PRIMARY KEY, answer TEXT)")
        except sqlite3.DatabaseError as error:
            raise InputError(f"{path}: not a cache of answers ({error}); remove it") from error

    def find(self, questions: Sequence[bytes]) -> dict[bytes, Any]:
        """The answers that are known."""
        known = {}
        for question in dict.fromkeys(questions):
            row = self._connection.execute("SELECT answer FROM answers WHERE question = ?", (question,)).fetchone()
            if row is not None:
                known[question] = json.loads(row[0])
        return known

    def add(self, answers: Mapping[bytes, Any]) -> None:
        with self._connection:
            self._connection.executemany(
                "INSERT OR REPLACE INTO answers VALUES (?, ?)",
                [(question, json.dumps(answer)) for question, answer in answers.items()],
            )

    def close(self) -> None:
        self._connection.close()


def question(kind: str, *parts: Any) -> bytes:
    """The digest of a question; parts are JSON values."""
    return hashlib.sha256(json.dumps([kind, *parts]).encode()).digest()

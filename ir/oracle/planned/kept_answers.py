"""Answers of the oracle on disk: that the share of a node, by a built-in rule, was executed and found right.

One JSON file for an op, a version of torch and the sources of this package; in it a digest for each distinct call and
strategy. What is wrong is not kept, and neither is what was found of other people's rules and ops: nobody can say here
whether the code behind them changed.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch

from shardfx.ir.graph import op_name
from shardfx.ir.oracle.findings import default_folder, write_whole

from .share_check import Answer

MOST = 5_000
"""Of the digests in a file the last ones are kept."""


@cache
def sources() -> str:
    """A digest of what decides whether a rule is right: the source files of ``shardfx.ir``."""
    root = Path(__file__).parents[2]
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


@dataclass
class AnswersFolder:
    """A folder of answers. What cannot be read is as if it were not there; what cannot be written is not kept."""

    folder: Path
    _read: dict[str, dict[str, str]] = field(default_factory=dict)
    _new: set[str] = field(default_factory=set)

    def get(self, op: Any, question: str) -> Answer | None:
        """What is kept of a question about an op."""
        found = self._of(op_name(op)).get(_digest(question))
        return None if found is None else Answer(left_out=found)

    def put(self, op: Any, question: str, answer: Answer) -> None:
        """Keep an answer, until :meth:`write` in memory; one that is not right is not kept."""
        if not answer.wrong:
            self._of(op_name(op))[_digest(question)] = answer.left_out
            self._new.add(op_name(op))

    def write(self) -> None:
        """Write what is new; what another process wrote meanwhile stays."""
        for op in self._new:
            known = {**self._load(op), **self._read[op]}
            text = json.dumps(dict(list(known.items())[-MOST:]), indent=0)
            write_whole(self._path(op), text)
        self._new.clear()

    def _path(self, op: str) -> Path:
        return self.folder / f"{torch.__version__}-{sources()}" / f"{op}.json"

    def _of(self, op: str) -> dict[str, str]:
        if op not in self._read:
            self._read[op] = self._load(op)
        return self._read[op]

    def _load(self, op: str) -> dict[str, str]:
        try:
            given = json.loads(self._path(op).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        sound = isinstance(given, dict) and all(isinstance(text, str) for text in given.values())
        return given if sound else {}


def _digest(question: str) -> str:
    return hashlib.sha256(question.encode()).hexdigest()[:24]


@cache
def kept_answers(folder: Path | None = None) -> AnswersFolder:
    """The answers beside the discovered rules, where the user's caches are."""
    return AnswersFolder((folder or default_folder()).parent / "checked")

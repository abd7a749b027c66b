"""Rows by part and cell, as they come in; kept as JSON all along, so that nothing is lost when a run is interrupted."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

Row = dict[str, Any]
RUNNING = "running"


class Results:
    """All rows of a run, and facts of the machine."""

    def __init__(self, path: Path | None = None, facts: Row | None = None) -> None:
        self.path, self.facts = path, facts or {}
        self.rows: dict[str, dict[str, Row]] = {}
        self._lock, self._began = threading.Lock(), time.monotonic()

    def expect(self, part: str, cells: list[str]) -> None:
        """The cells of a part, in order: none of them is measured yet."""
        with self._lock:
            self.rows[part] = {cell: {"status": "not reached"} for cell in cells}
            self._write()

    def add(self, part: str, cell: str, fields: Row) -> None:
        """Add fields to a row; say the row where it is done, and write the file."""
        with self._lock:
            row = self.rows[part].setdefault(cell, {})
            row |= fields
            if fields.get("status", RUNNING) != RUNNING:
                why = f": {row['why']}" if row.get("why") else ""
                at = time.monotonic() - self._began
                print(f"{at:6.1f} s  {part:8} {cell:48} {row['status']}{why}", flush=True)
            self._write()

    def note(self, text: str) -> None:
        """Keep a line beside the rows."""
        with self._lock:
            print(text, flush=True)
            self.facts["notes"] = [*self.facts.get("notes", ()), text]
            self._write()

    def status(self, part: str, cell: str) -> str:
        return str(self.rows[part][cell].get("status"))

    def of(self, part: str) -> dict[str, Row]:
        """The rows of a part; none where it was not asked for."""
        return self.rows.get(part, {})

    @property
    def bad(self) -> list[str]:
        """The cells that are not as they should be."""
        good = ("ok", "n/a")
        return [f"{p}: {c}" for p, cells in self.rows.items() for c, row in cells.items() if row["status"] not in good]

    def _write(self) -> None:
        if self.path is not None:
            beside = self.path.with_suffix(".part")
            beside.write_text(json.dumps({"facts": self.facts, "parts": self.rows}, indent=1), encoding="utf-8")
            beside.replace(self.path)

    @classmethod
    def load(cls, *paths: Path) -> Results:
        """The inverse of what is written: of several files the parts together, of the same part the last."""
        found = cls()
        for path in paths:
            text = json.loads(path.read_text(encoding="utf-8"))
            found.facts |= text["facts"]
            found.rows |= text["parts"]
        return found

"""What was discovered, kept on disk: one small JSON file for an op, the class of its shapes and a version of torch."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from .findings import Findings, from_json, to_json


def default_folder() -> Path:
    """``shardfx/rules`` where the user's caches are: under ``XDG_CACHE_HOME``, or ``~/.cache``."""
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "shardfx" / "rules"


@dataclass(frozen=True)
class Store:
    """A folder of findings. What cannot be read is as if it were not there; where nothing can be written, nothing is
    kept."""

    folder: Path

    def path(self, key: Mapping[str, str]) -> Path:
        """The file of a key."""
        digest = hashlib.sha256(json.dumps(dict(key), sort_keys=True).encode()).hexdigest()
        return self.folder / f"{digest[:32]}.json"

    def get(self, key: Mapping[str, str]) -> Findings | None:
        """What is kept under a key."""
        try:
            given = json.loads(self.path(key).read_text(encoding="utf-8"))
            return from_json(given["found"]) if given["key"] == dict(key) else None
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None

    def put(self, key: Mapping[str, str], found: Findings) -> None:
        """Keep findings; a reader never sees half a file."""
        text = json.dumps({"key": dict(key), "found": to_json(found)}, indent=1)
        with suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=self.folder, suffix=".tmp")
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
            Path(name).replace(self.path(key))

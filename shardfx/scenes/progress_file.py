"""Which windows of a scene are done, in a file: so that what was ended half-way goes on where it was.

{"scene": [3, 900, 700], "out": [5, 900, 700], "window": [256, 256], "weights": "5b0c..."}
[0, 1]
[2, 3]
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardfx.ir.errors import Error
from shardfx.runtime.distributed.checksum import checksum

if TYPE_CHECKING:
    from shardfx.module.parallel_module import ParallelModule


def fingerprint(pm: ParallelModule, scene: Sequence[int], out: Sequence[int], window: Sequence[int]) -> dict[str, Any]:
    """What a run is of: another one must not go on with its windows."""
    total = sum(checksum(tensor.cpu()) * (i + 1) for i, tensor in enumerate(pm.full_state_dict().values()))
    return {"scene": list(scene), "out": list(out), "window": list(window), "weights": f"{total % (1 << 64):x}"}


class Done:
    """The windows that are done, by number.

    Args:
        path: of the file; None: nothing is kept.
        run: what the run is of.
        silent: another process writes the file.

    Raises:
        Error: the file is of another run, or no such file; there is no folder for it.
    """

    def __init__(self, path: str | Path | None, run: Mapping[str, Any], silent: bool) -> None:
        self._path = None if path is None else Path(path)
        self._run, self._silent, self._begun, self._numbers = dict(run), silent, False, set[int]()
        if self._path is not None and not self._path.parent.is_dir():
            raise Error(
                "there is no folder for the state",
                where=str(path),
                expected="a folder that is there",
                got=f"no {self._path.parent}",
                remedy="make it, or name a file elsewhere",
            )
        if self._path is None or not self._path.exists():
            return
        lines = self._path.read_text().split("\n")[:-1]  # a last line without an end was not written to its end
        try:
            found, *done = (json.loads(line) for line in lines)
            self._numbers |= {int(number) for numbers in done for number in numbers}
        except (ValueError, TypeError) as error:
            raise Error(
                "this is no state of a run",
                where=str(path),
                expected="what predict_scene(state=...) wrote",
                got=f"{type(error).__name__}: {error}" if lines else "no line that was written to its end",
                remedy="delete it, to begin anew",
            ) from error
        if found != self._run:
            other = next(key for key in run if found.get(key) != run[key])
            raise Error(
                f"the state is of another run: {other} differs",
                where=str(path),
                expected=f"{other} {run[other]}",
                got=found.get(other),
                remedy="delete it, to begin anew",
            )

    def __contains__(self, number: int) -> bool:
        return number in self._numbers

    def __str__(self) -> str:
        return f"{len(self._numbers)} windows, {sum(self._numbers)}"

    def add(self, out: Any, numbers: Sequence[int]) -> None:
        """Some more are done: what was written is on the disk before that is said."""
        if self._path is None or self._silent:
            return
        flush = getattr(out, "flush", None)
        if flush is not None:
            flush()
        lines = [] if self._begun else [self._run, sorted(self._numbers)]
        with self._path.open("a" if self._begun else "w") as file:
            file.writelines(json.dumps(line) + "\n" for line in [*lines, list(numbers)])
            file.flush()
            os.fsync(file.fileno())
        self._begun = True

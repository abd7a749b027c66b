"""The Python that pages show, run: ``python -m tests.pages`` writes what it prints now into the pages.

A block ```` ```pycon ```` is a shard of an interactive session; the blocks of a page are one session, in the folder of
the repository. A block ```` ```python ```` is code that a page shows and the test runs; a block
```` ```diff ```` is a script and what becomes of it, of which tests run both.
"""

from __future__ import annotations

import contextlib
import doctest
import io
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).parents[1]
PAGES = (
    "docs/architecture.md",
    "docs/graph.md",
    "docs/large_images.md",
    "docs/pipelines.md",
    "docs/schedules.md",
    "docs/long-context.md",
    "docs/experts.md",
    "docs/loops.md",
    "docs/tables.md",
    "docs/writing_rules.md",
)
SESSION = re.compile(r"(?<=^```pycon\n)(.*?)(?=^```$)", re.DOTALL | re.MULTILINE)
CODE = re.compile(r"(?<=^```python\n)(.*?)(?=^```$)", re.DOTALL | re.MULTILINE)


DIFF = re.compile(r"(?<=^```diff\n)(.*?)(?=^```$)", re.DOTALL | re.MULTILINE)


def read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def ports(page: str) -> list[tuple[str, str]]:
    """The scripts that a page ports, as they were and as they are then."""
    blocks = [block.splitlines() for block in DIFF.findall(read(page))]
    before, after = ([[line[1:] for line in block if line[:1] != sign] for block in blocks] for sign in "+-")
    return [("\n".join(old), "\n".join(new)) for old, new in zip(before, after, strict=True)]


def renewed(page: str) -> str:
    """The page with what its sessions print now."""
    session = ModuleType("page_session")
    sys.modules[session.__name__] = session  # Dynamo looks up globals there
    try:
        with in_root():
            return SESSION.sub(lambda match: run(match[1], vars(session)), read(page))
    finally:
        del sys.modules[session.__name__]


def run(session: str, scope: dict[str, Any]) -> str:
    """A session with the results that its examples have now."""
    parts = []
    for example in doctest.DocTestParser().get_examples(session):
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(compile(example.source, "<page>", "single"), scope)
        first, *more = example.source.splitlines()
        parts += [f">>> {first}", *(f"... {line}".rstrip() for line in more), *out.getvalue().splitlines()]
    return "\n".join([*parts, ""])


@contextlib.contextmanager
def in_root() -> Iterator[None]:
    before = Path.cwd()
    os.chdir(ROOT)
    try:
        yield
    finally:
        os.chdir(before)


if __name__ == "__main__":
    for each in PAGES:
        (ROOT / each).write_text(renewed(each), encoding="utf-8")
        print(each)

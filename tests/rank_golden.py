"""Golden texts of rank passes: a program as it is lowered, and after each pass. ``python -m tests.rank_golden`` renews.

``tests/golden/rank_passes/<case>.graph.txt`` is the planned graph, ``<case>.txt`` the programs of rank 1.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from shardfx.ir.graph import OutputKind
from shardfx.ir.program.lower import lower
from shardfx.ir.program.program_text import parse_program
from shardfx.ir.rulebook import default_rules
from shardfx.ir.text import parse_graph
from shardfx.passes.rank import Arena, RankContext, built_in, run_rank_passes
from tests.unit_orders import ONE_AHEAD, arranged

FOLDER = Path(__file__).parent / "golden" / "rank_passes"
CASES = sorted(path.name.removesuffix(".graph.txt") for path in FOLDER.glob("*.graph.txt"))

ARRANGED = {"in_units": partial(arranged, ONE_AHEAD)}
"""How the steps of some are arranged."""


def made(case: str) -> str:
    """The program after each pass; each is read back from the text of the one before. At the end the program for
    ``torch.compile``, of cases whose new contents are written back."""
    graph = parse_graph((FOLDER / f"{case}.graph.txt").read_text(encoding="utf-8"))
    program = lowered = lower(graph, 1, default_rules(), set(OutputKind), arrange=ARRANGED.get(case))
    texts = [f"lowered:\n{program}"]
    established = frozenset[str]()
    for each in (*built_in("cpu"), Arena(least=1)):
        before, context = str(program), RankContext(graph, established=established)
        program = run_rank_passes(parse_program(before, graph), [each], context)
        established |= each.establishes
        same = str(program) == before
        texts.append(f"{each}:{' nothing changes' if same else chr(10) + str(program)}")
    compiled = run_rank_passes(lowered.copy(), built_in("cpu", compiled=True), RankContext(graph))
    if "memory.write" in str(compiled):
        texts.append(f"compiled:\n{compiled}")
    return "\n".join(text.rstrip("\n") + "\n" for text in texts)


def main() -> None:
    """Write all texts anew."""
    for case in CASES:
        (FOLDER / f"{case}.txt").write_text(made(case), encoding="utf-8")


if __name__ == "__main__":
    main()

"""``python -m tests.golden`` writes the golden texts anew; with ``--capture`` those of the captured models too."""

from __future__ import annotations

import sys

from shardfx.ir.capture.trace import capture
from tests.golden import ALWAYS, CAPTURE, FOLDER, goldens, printed
from tests.plans import MESHES, specs_of
from tests.zoo import make

STORED = {"layers.*.fc1.weight": "tp, dp", "layers.*.proj.weight": "dp, tp", "head.weight": "tp, dp"}
"""Parameters of the GPT that are stored sharded over the data axis, too."""
MODELS: dict[str, tuple[str, str, bool, dict[str, str]]] = {
    "gpt": ("gpt_fused", "dp2tp2", True, STORED),
    "bert": ("hf_bert", "dp2tp2", False, {}),
    "resnet": ("resnet", "dp2tp2", False, {}),
    "unet": ("unet", "2x2x2", False, {}),
}
"""File name -> case of the zoo, mesh, whether tokens are sharded, further hints."""


def captured(name: str) -> str:
    """The text of a model as it is captured, its hints before it."""
    case_name, mesh_name, sequence, more = MODELS[name]
    case, mesh = make(case_name), MESHES[mesh_name]
    found = capture(case.model, mesh, args=case.args, kwargs=case.kwargs, loss=case.loss, targets=case.targets)
    specs = specs_of(case, mesh, sequence) | more
    return "".join(f"# hint {key}: {spec}\n" for key, spec in specs.items()) + printed(found.graph) + "\n"


def main(with_capture: bool) -> None:
    """Write the files; says which changed."""
    for name in MODELS:
        path = FOLDER / CAPTURE / f"{name}.txt"
        path.parent.mkdir(exist_ok=True)
        if with_capture or not path.exists():
            path.write_text(captured(name), encoding="utf-8")
    for each in ALWAYS:
        for name in MODELS:
            (FOLDER / each).mkdir(exist_ok=True)
            (FOLDER / each / f"{name}.txt").touch()
    for golden in goldens():
        before, now = golden.expected, golden.made()
        if before != now:
            golden.path.write_text(now, encoding="utf-8")
            print(golden, "changed" if before else "made")


if __name__ == "__main__":
    main("--capture" in sys.argv[1:])

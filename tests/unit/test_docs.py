"""What README and docs/ show runs, and shows what it gives now; links lead somewhere."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from accelerate.state import AcceleratorState
from safetensors.torch import load_file
from torch import Tensor, nn

import shardfx as sx
import shardfx.ir
import shardfx.passes
import shardfx.runtime
from tests.pages import CODE, PAGES, ROOT, ports, read, renewed

DOCUMENTS = ["README.md", "CHANGELOG.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md")))]
LINK = re.compile(r"""\]\(([^)#\s]+)[^)]*\)|src="([^"]+)\"""")


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.relu(self.up(x)))


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_sessions_print_what_the_page_says(page: str) -> None:
    """If a change is meant: ``python -m tests.pages`` writes the page anew."""
    assert renewed(page) == read(page)


@pytest.mark.long
def test_the_lines_of_the_readme_run(tmp_path: Path) -> None:
    (code,) = CODE.findall(read("README.md"))
    assert len(code.splitlines()) == 5
    x, y = torch.randn(8, 6), torch.randint(0, 4, (8,))
    scope: dict[str, Any] = {"sx": sx, "loss": F.cross_entropy, "model": FeedForward(), "x": x, "y": y}
    exec(code, scope)
    pm = scope["pm"]
    assert pm.verify()
    why = str(pm.explain("down.weight"))
    assert why.startswith("parameter %down.weight : f32[4, 8{tp}]") and "the hint 'up.weight'" in why
    assert "all-reduce" in str(pm.report())
    assert [path.name for path in pm.draw(tmp_path)] == ["before.svg", "after.svg"]
    assert "all_reduce" in pm.rank_module(1).code


@pytest.mark.long
@pytest.mark.parametrize("which", [1, 2], ids=["Trainer", "accelerate"])
def test_scripts_that_porting_shows_train_the_same(which: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """(That for DistributedDataParallel runs on real ranks, in tests/torchrun/test_ported.py.)"""
    trained = []
    for script in ports("docs/porting.md")[which]:
        monkeypatch.chdir(tmp_path)
        AcceleratorState._reset_state(True)
        exec(script, {})
        (path,) = (path for name in ("trained", "state") for path in tmp_path.glob(f"{name}/model.safetensors"))
        trained.append(load_file(path))
        path.unlink()
    AcceleratorState._reset_state(True)
    torch.testing.assert_close(*trained, rtol=0, atol=1e-5)


@pytest.mark.parametrize("page", DOCUMENTS)
def test_links_lead_somewhere(page: str) -> None:
    targets = [a or b for a, b in LINK.findall(read(page))]
    missing = [t for t in targets if "://" not in t and not (ROOT / page).parent.joinpath(t).exists()]
    assert not missing


@pytest.mark.long
def test_pictures_are_of_the_plans_that_are_made_now(tmp_path: Path) -> None:
    """If a change is meant: ``python docs/make_pictures.py`` draws them anew."""
    drawn = runpy.run_path(str(ROOT / "docs" / "make_pictures.py"))["main"](tmp_path)
    assert {path.name for path in drawn} == {path.name for path in (ROOT / "docs" / "pictures").iterdir()}
    for path in drawn:
        described = [re.search("<desc>(.*)</desc>", p.read_text()) for p in (path, ROOT / "docs/pictures" / path.name)]
        assert described[0] and described[1] and described[0][1] == described[1][1]


@pytest.mark.parametrize("facade", [shardfx.ir, shardfx.passes, shardfx.runtime])
def test_the_names_for_plugins_are_on_their_page(facade: ModuleType) -> None:
    page = read("docs/writing_passes.md")
    assert not [name for name in facade.__all__ if f"`{name}`" not in page]

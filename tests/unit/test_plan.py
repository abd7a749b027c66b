"""Plans: saved, loaded, compared, and given back; a file or a model that does not fit is told so."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Shard

import shardfx as sx
from shardfx.ir.graph import Graph
from tests.captures import captured_once
from tests.plans import MESHES, plan
from tests.zoo import Case, make

X, Y = torch.randn(8, 6), torch.randint(0, 4, (8,))
MESH = sx.Mesh(dp=2, tp=2)


class Net(nn.Module):
    def __init__(self, hidden: int = 8) -> None:
        super().__init__()
        self.fc1 = nn.Linear(6, hidden)
        self.fc2 = nn.Linear(hidden, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(F.relu(self.fc1(x)))


@captured_once("test_plan")
def small(
    specs: object, model: nn.Module | None = None, mesh: sx.Mesh = MESH, x: torch.Tensor = X
) -> sx.ParallelModule:
    hints = sx.Hints(args=(x,), loss=F.cross_entropy, targets=(Y[: len(x)],), specs=specs)  # type: ignore[arg-type]
    return sx.parallelize(model or Net(), mesh, hints)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pm = small({"args.0": "dp, -", "targets.0": "dp", "fc1.weight": "tp, -", "fc1.bias": "tp", "fc2": "dp, -"})
    return pm.plan.save(tmp_path_factory.mktemp("plan") / "folder" / "plan.json")


def again(case: Case, given: sx.Plan) -> sx.ParallelModule:
    hints = sx.Hints(args=case.args, kwargs=case.kwargs, loss=case.loss, targets=case.targets, specs=given.specs)
    with captured_once(case.name):
        return sx.parallelize(case.model, given.mesh, hints)


class Tied(nn.Module):
    """The head is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 8)
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(x)).flatten(0, 1)


def tied() -> Case:
    tokens = torch.randint(0, 12, (4, 6))
    specs = {"head.weight": "tp, -", "embed": "dp, -, -"}
    return Case("tied", Tied(), (tokens,), {}, F.cross_entropy, (tokens.flatten(),), specs)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "mesh", "sequence"),
    [
        ("gpt_fused", "dp2tp2", True),
        ("tied", "2x2x2", False),
    ],
)
def test_a_plan_given_back_is_the_same_program(name: str, mesh: str, sequence: bool, tmp_path: Path) -> None:
    """A fused qkv weight (a compound), batch norm decomposed, tied weights: each comes out as it was."""
    case = tied() if name == "tied" else make(name)
    pm = plan(copy.deepcopy(case), MESHES[mesh], sequence)
    loaded = sx.Plan.load(pm.plan.save(tmp_path / "plan.json"))
    assert loaded == pm.plan
    other = again(case, loaded)
    assert unhinted(other.planned) == unhinted(pm.planned)
    assert other.plan == loaded
    assert not other.report().warnings


def unhinted(graph: Graph) -> str:
    """The text of a graph without hints: a plan given back may bring more of them."""
    graph = graph.copy()
    for value in graph.values():
        value.hint, value.hinted_by = None, ""
    return str(graph)


def test_what_is_in_a_plan(saved: Path) -> None:
    loaded = sx.Plan.load(saved)
    assert loaded.mesh == MESH
    assert loaded.inputs["fc1.weight"] == "[8{tp}, 6]" and loaded.inputs["args.0"] == "[8{dp}, 6]"
    assert loaded.hinted == {"fc2": "[8{dp}, 4]"}
    assert loaded.strategies["forward fc1 aten.addmm 0"] == "n{tp} m{dp}"
    assert loaded.passes[0] == "bind-hints" and loaded.passes[-1] == "order{ahead=1}"
    assert loaded.passes[-3:-1] == ("bucket-comm{mb=25.0}", "loops{fetch=False,strict=False}")
    assert loaded.torch == torch.__version__
    assert loaded.specs["fc1.weight"] == sx.Spec.parse("tp, -", MESH)


@pytest.mark.long
def test_a_plan_is_for_one_model_and_one_mesh(saved: Path) -> None:
    specs = sx.Plan.load(saved).specs
    with pytest.raises(sx.Error, match="another model") as caught:
        small(specs, nn.Sequential(nn.Linear(6, 4)))
    assert "fc1.weight" in str(caught.value.got) and "0.weight" in str(caught.value.got)
    with pytest.raises(sx.Error, match="another model, or for other shapes"):
        small(specs, x=X[:4])
    with pytest.raises(sx.Error, match="another mesh") as caught:
        small(specs, mesh=sx.Mesh(dp=4, tp=2))
    assert (caught.value.expected, caught.value.got) == ("Mesh(dp=2, tp=2)", "Mesh(dp=4, tp=2)")
    assert small(dict(specs), x=X[:4]).plan.inputs["args.0"] == "[4{dp}, 6]"  # plain hints ask nothing


def test_a_plan_that_comes_out_otherwise_is_an_error(saved: Path) -> None:
    loaded = sx.Plan.load(saved)
    key = "forward fc1 aten.addmm 0"
    changed = replace(loaded, strategies={**loaded.strategies, key: "n{tp}"})
    with pytest.raises(sx.Error, match="1 ops or inputs came out otherwise than in the plan given") as caught:
        small(changed.specs)
    assert caught.value.got == f"{key}: n{{tp}} in the plan, n{{tp}} m{{dp}} here"
    stored = replace(loaded, inputs={**loaded.inputs, "fc1.weight": "[8, 6]"})
    with pytest.raises(sx.Error, match="came out otherwise"):
        small(stored.specs)
    assert small(dict(changed.specs))


class Two(nn.Module):
    """What follows from hints on it is no hint: as one, it would decide between the two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(self.fc1(x).tanh() @ self.fc1.weight).cumsum(1)


@pytest.mark.parametrize(
    ("specs", "shardings"),
    [
        ({"args.0": "dp, -"}, {"fc1": "m{}", "fc2": "k{dp} n{tp}"}),
        ({"fc*.weight": (Shard(0), Shard(1))}, {":cumsum": "d0{tp dp}"}),
    ],
)
def test_what_followed_from_hints_is_no_hint(specs: dict[str, Any], shardings: dict[str, Any], tmp_path: Path) -> None:
    def planned(specs: Any, shardings: Any) -> sx.ParallelModule:
        hints = sx.Hints(
            args=(torch.randn(8, 8),), loss=F.cross_entropy, targets=(Y,), specs=specs, strategies=shardings
        )
        return sx.parallelize(Two(), MESH, hints)

    pm = planned(specs, shardings)
    loaded = sx.Plan.load(pm.plan.save(tmp_path / "plan.json"))
    for given in ({}, loaded.hinted_strategies):
        again = planned(loaded.specs, given)
        assert unhinted(again.planned) == unhinted(pm.planned) and again.plan == loaded


# ---- files


def broken(saved: Path, folder: Path, **changes: object) -> Path:
    content = {**json.loads(saved.read_text()), **changes}
    path = folder / "broken.json"
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))
    return path


def test_files_that_are_no_plan(saved: Path, tmp_path: Path) -> None:
    path = tmp_path / "short.json"
    path.write_text(saved.read_text()[:-3])
    with pytest.raises(sx.Error, match="cut short") as caught:
        sx.Plan.load(path)
    assert caught.value.where == str(path)
    with pytest.raises(sx.Error, match="cannot be read"):
        sx.Plan.load(tmp_path / "not_there.json")
    for text in ("[]", "3", "{}", '{"format": "something else"}'):
        (tmp_path / "other.json").write_text(text)
        with pytest.raises(sx.Error, match="is not a plan"):
            sx.Plan.load(tmp_path / "other.json")
    (tmp_path / "binary.json").write_bytes(b"\x80\x04\x95")
    with pytest.raises(sx.Error, match="no JSON"):
        sx.Plan.load(tmp_path / "binary.json")
    with pytest.raises(sx.Error, match="another version") as caught:
        sx.Plan.load(broken(saved, tmp_path, version=2, shardfx="9.0"))
    assert caught.value.got == "version 2, written by shardfx 9.0"


WRONG: tuple[object, ...] = (None, 3, -1, 10**30, 1e400, True, "x", "*", [], [[]], {}, {"x": "[2]"})


def places(content: object, path: tuple[object, ...] = ()) -> Iterator[tuple[object, ...]]:
    """The path of everything in a JSON value."""
    for key, each in content.items() if isinstance(content, dict) else enumerate(content):  # type: ignore[call-overload]
        yield (*path, key)
        if isinstance(each, (dict, list)):
            yield from places(each, (*path, key))


@pytest.mark.long
def test_every_value_of_a_plan_with_every_wrong_type(saved: Path, tmp_path: Path) -> None:
    """An error, or a plan that is one: never another exception, when it is read and when it is used."""
    path, refused, loads = tmp_path / "wrong.json", 0, 0
    whole = json.loads(saved.read_text())
    cases = [(place, wrong) for place in places(whole) for wrong in WRONG]
    for place, wrong in cases:
        content: Any = json.loads(saved.read_text())
        holder = content
        for key in place[:-1]:
            holder = holder[key]
        holder[place[-1]] = wrong
        path.write_text(json.dumps(content))
        try:
            loaded = sx.Plan.load(path)
        except sx.Error as error:
            refused += str(path) in str(error.where)
            continue
        assert all(type(text) is str for text in (*loaded.inputs.values(), *loaded.strategies, *loaded.passes))
        assert type(hash(loaded.mesh)) is int and len(loaded.specs) >= 1
        loads += 1
    assert refused + loads == len(cases)
    assert refused > 0.8 * len(cases)


def test_files_that_are_too_large_or_too_deep(tmp_path: Path) -> None:
    path = tmp_path / "deep.json"
    path.write_text("[" * 200_000)
    with pytest.raises(sx.Error, match="no JSON"):
        sx.Plan.load(path)
    path.write_text(f'{{"format": "shardfx plan", "version": {"9" * 10_000}}}')
    with pytest.raises(sx.Error, match="no JSON"):
        sx.Plan.load(path)
    with path.open("wb") as file:
        file.truncate(1 << 29)  # takes no room on the disk
    with pytest.raises(sx.Error, match="too large"):
        sx.Plan.load(path)


def test_no_code_in_files() -> None:
    """Plans are JSON, and weights are read with ``weights_only``."""
    root = Path(__file__).parents[2]
    for folder in ("ir", "passes", "runtime", "visualize", "shardfx"):
        for file in (root / folder).rglob("*.py"):
            text = file.read_text(encoding="utf-8")
            if file.name == "run_isolated.py":  # what a copy of this process answers, through a pipe
                continue
            assert not re.search(r"\bpickle\b|\bmarshal\b|\bshelve\b", text), file
            assert all("weights_only=True" in line for line in text.splitlines() if "torch.load(" in line), file

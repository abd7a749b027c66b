"""Machines: known ones, text and back, links by the place of an axis, plans and times that follow them, bad figures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import shardfx as sx
from shardfx.ir.cost.amounts import Cost, Work, total
from shardfx.ir.cost.machine import FOLDER, Machine
from shardfx.ir.ops.sends import Sent

KNOWN = sorted(path.stem for path in FOLDER.glob("*.json"))


@pytest.mark.parametrize("name", KNOWN)
def test_a_known_machine_is_read_and_written(name: str, tmp_path: Path) -> None:
    machine = sx.Machine.load(name)
    assert machine.name == name and machine.source
    assert Machine.parse(str(machine)) == machine
    machine.save(tmp_path / "mine.json")
    assert Machine.load(tmp_path / "mine.json") == machine


def test_the_machines_that_are_promised_are_there() -> None:
    assert {"h100-dgx", "a100-dgx", "cpu-laptop"} <= set(KNOWN)
    h100 = Machine.load("h100-dgx")
    assert h100.rate(torch.bfloat16) == 989e12
    assert h100.rate(torch.int8) == min(h100.flops.values()), "a dtype that is not listed counts as the slowest"


def test_an_axis_has_the_nearest_link_that_reaches_over_its_groups() -> None:
    h100 = Machine.load("h100-dgx")
    near, far = (level.link for level in h100.links)

    def links(mesh: sx.Mesh) -> list[sx.Link]:
        return [axis.link for axis in h100.connect(mesh).axes]

    assert links(sx.Mesh(dp=4, tp=8)) == [far, near]
    assert links(sx.Mesh(dp=2, mb=sx.Loop(3), tp=4)) == [near, near, near], "iterations take no ranks"
    assert links(sx.Mesh(dp=8, tp=2)) == [far, near]
    assert links(sx.Mesh(tp=6)) == [far], "groups of 6 do not fill nodes of 8"
    own = sx.Link(1e9, 1e-6)
    stated = h100.connect(sx.Mesh(dp=4, tp=8, links={"tp": own}))
    assert stated["tp"].link == own and stated["dp"].link == far
    assert h100.connect(stated) == stated
    a100 = Machine.load("a100-dgx")
    assert a100.connect(h100.connect(sx.Mesh(dp=4, tp=8)), instead_of=h100) == a100.connect(sx.Mesh(dp=4, tp=8))
    assert a100.connect(stated, instead_of=h100)["tp"].link == own


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"bandwidth": 0}, "bandwidth must be positive"),
        ({"flops": {"floof": 1}}, "unknown dtype"),
        ({"links": []}, "the last link must connect all ranks"),
        ({"pools": {"tape": {}}}, "no other memory is called so"),
        ({"color": "green"}, "no description of a machine"),
    ],
)
def test_a_description_that_is_wrong_is_an_error(change: dict[str, object], said: str) -> None:
    fields = json.loads(Machine.load("accelerator").json()) | change
    with pytest.raises(sx.Error, match=said):
        Machine.parse(json.dumps(fields))


def test_text_that_is_no_machine_and_names_of_none_are_errors() -> None:
    with pytest.raises(sx.Error, match="no description of a machine"):
        Machine.parse("flops: many")
    with pytest.raises(sx.Error, match="no machine is called 'h1000'") as caught:
        sx.Hints(machine="h1000")
    assert "h100-dgx" in str(caught.value.expected)


def test_plans_are_made_for_the_machine() -> None:
    """The graph's mesh has the machine's links, in its text too; the user's own mesh stays as it was."""
    mesh, x = sx.Mesh(dp=2, tp=8), torch.randn(4, 16)
    pm = sx.parallelize(
        torch.nn.Linear(16, 8), mesh, sx.Hints(args=(x,), specs={"args.0": "dp, -"}, machine="h100-dgx")
    )
    assert pm.planned.mesh["tp"].link.bandwidth == 450e9 and pm.planned.mesh["dp"].link.bandwidth == 50e9
    assert "link tp bandwidth=450000000000.0" in str(pm.planned) and mesh == sx.Mesh(dp=2, tp=8)
    assert torch.allclose(pm(x), pm(x))


# ---- amounts


def test_costs_add_and_multiply() -> None:
    heavy, light = Work(4e12, 1e9), Work(0.0, 6e9)
    block = Cost({heavy: 1, light: 2}, {("tp",): Sent(2.0, 1e9)})
    twice = block + block
    assert twice == 2 * block == block * 2 == total([block, block])
    assert (twice.flops, twice.touched, twice.nbytes) == (8e12, 26e9, 2e9)
    assert (block + Cost(sent={("dp",): Sent(1.0, 5.0)})).sent == {("tp",): Sent(2.0, 1e9), ("dp",): Sent(1.0, 5.0)}

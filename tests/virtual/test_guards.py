"""Models whose code depends on the data: captured as they run for the example, with guards that every call checks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardfx as sx
from shardfx.ir.graph import Guard, OutputKind
from shardfx.ir.text import parse_graph

F64 = torch.float64


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 8, dtype=F64)
        self.register_buffer("calls", torch.zeros((), dtype=F64))

    def forward(self, x: Tensor, mask: Tensor, image: Tensor) -> Tensor:
        self.calls.add_(1)
        y = self.fc(x)
        y = y * 3
        if y.sum() > 0:
            y = y + 1
        y = y / mask.sum().item()
        return y.masked_scatter(mask[:, None].expand_as(y), image * y[mask])


class Net(nn.Module):
    """A branch, a number, a selection of rows, and features scattered into it, as in llava."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.out = nn.Linear(8, 4, dtype=F64)

    def forward(self, x: Tensor, mask: Tensor, image: Tensor) -> Tensor:
        return F.relu(self.out(self.block(x, mask, image)))


def batch() -> tuple[Tensor, Tensor, Tensor]:
    mask = torch.tensor([True, False, False, True, False, True, False, False])
    return torch.randn(8, 6, dtype=F64), mask, torch.randn(3, 8, dtype=F64)


def loss(out: Tensor) -> Tensor:
    return out.square().sum()


def make(model: nn.Module, args: tuple[Any, ...], mesh: sx.Mesh | None = None, **more: Any) -> sx.ParallelModule:
    given = {"args": args, "loss": loss, "specs": {}, "guard": True} | more
    return sx.parallelize(model, mesh or sx.Mesh(dp=2), sx.Hints(**given))


def guards(pm: sx.ParallelModule) -> list[Guard]:
    return [output.guard for output in pm.planned.outputs if output.guard is not None]


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:redundant compute over dp")  # what a mask picks of a batch is computed whole
def test_branch_of_the_example_equals_one_device() -> None:
    model, args = Net(), batch()
    pm = make(model, args, sx.Mesh(dp=2, tp=2), specs={"args.0": "dp, -", "block.fc.weight": "tp, -"})
    reference = copy.deepcopy(model)
    expected = loss(reference(*args))
    expected.backward()
    made = pm(*args)
    made.backward()
    assert torch.allclose(made, expected, rtol=1e-12)
    grads = pm.full_grads()
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(grads[name], parameter.grad, rtol=1e-10, atol=1e-12)
    assert pm.full_state_dict()["block.calls"] == 1
    assert [guard.where.module for guard in guards(pm)] == ["block"] * 3
    assert pm.verify()
    assert str(parse_graph(str(pm.planned))) == str(pm.planned)


def test_call_that_takes_another_branch_is_an_error_and_changes_nothing() -> None:
    model, (x, mask, image) = Net(), batch()
    pm = make(model, (x, mask, image))
    with torch.no_grad():
        taken = bool(model.block.fc(x).sum() > 0)
        other = next(n * x for n in (-9e9, 9e9) if bool(model.block.fc(n * x).sum() > 0) is not taken)
    with pytest.raises(sx.Error, match="elsewhere than the example") as caught:
        pm(other, mask, image)
    error = caught.value
    assert error.where is not None and error.where.startswith("block  test_guards.py:")
    assert error.where.endswith("if y.sum() > 0:")
    assert str(error.expected).startswith(str(taken)) and error.got == str(not taken)
    with pytest.raises(sx.Error, match=r"mask.sum\(\).item\(\)(.|\n)*expected: 3(.|\n)*got: +4"):
        pm(x, mask | (torch.arange(8) == 1), image)
    assert pm.full_state_dict()["block.calls"] == 0
    pm(x, mask, image).backward()
    assert pm.full_state_dict()["block.calls"] == 1


ASKS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "bool": lambda x, n: x if n[0] else -x,
    "item": lambda x, n: x * n.sum().item() + x.max().item(),
    "int": lambda x, n: x * int(x.max()) + x[int(n[1])],
    "float": lambda x, n: x * float(x.max()),
    "range": lambda x, n: sum(x * i for i in range(n[1])),  # type: ignore[call-overload]
    "list": lambda x, n: torch.cat(x.split(n.tolist(), 0)[::-1]),
    "nonzero": lambda x, n: x[torch.nonzero(n, as_tuple=True)] * n.nonzero().sum(),
    "where": lambda x, n: x[torch.where(x > 0)].sum() + torch.argwhere(x > 0).sum(),
    "masks": lambda x, n: x[x > 0].sum() + x[:, n.new_ones(5, dtype=torch.bool) & (n > 1)].sum() + x[n > 1, :2].sum(),
    "slices": lambda x, n: x[: n[1], n[2] :],
    "write one": lambda x, n: _write(x, x > 0, 7.0),
    "write many": lambda x, n: _write(x, n > 1, x[n > 1] * 2),
    "select": lambda x, n: x.masked_select(n > 1).sum() + torch.masked_select(x, x > 0).sum(),
    "repeat": lambda x, n: x.repeat_interleave(n, 0).sum(0) + n.repeat_interleave(2).sum(),
    "count": lambda x, n: x * n.bincount()[1] + n.bincount(x[:, 0], minlength=9).sum(),
    "one hot": lambda x, n: F.one_hot(n).sum() * x,
    "sizes": lambda x, n: torch.ones(n[2], dtype=F64).sum() * x.new_zeros(n[1], 3).numel() + x.expand(n[1], 5, 5),
    "equal": lambda x, n: x if torch.equal(n, n * 2) or torch.allclose(x, x + 1e-12) else -x,
    "names": lambda x, n: torch.full(size=(5,), fill_value=n[1]) * x if torch.equal(input=n, other=n) else -x,
    "array": lambda x, n: x * float(n.cpu().numpy().cumsum(0)[-1]) + float(x[:2].detach().numpy()[1, 1]),
    "set": lambda x, n: x if len(set(n.tolist())) > 1 else -x,
    "contains": lambda x, n: x if 3 in n else -x,
    "text": lambda x, n: {f"{n[1]}": x}.popitem()[1] * n[1],
    "any": lambda x, n: x if (n > 2).any() and not (n > 2).all() else -x,
}


def _write(x: Tensor, where: Tensor, value: Any) -> Tensor:
    x = x.clone()
    x[where] = value
    return x


class Asks(nn.Module):
    def forward(self, x: Tensor, n: Tensor) -> Any:
        return {name: ask(x, n) for name, ask in ASKS.items()}


@pytest.mark.long
def test_reads_of_data_of_all_kinds_are_guarded() -> None:
    x, n = torch.randn(5, 5, dtype=F64), torch.tensor([1, 2, 0, 2, 0])
    expected = Asks()(x, n)
    pm = make(Asks(), (x, n), loss=None, specs={"args.0": "dp, -"})
    for name, made in pm(x, n).items():
        torch.testing.assert_close(made, expected[name], msg=lambda text, name=name: f"{name}: {text}")
    with pytest.raises(sx.Error, match="elsewhere"):
        pm(x, n.flip(0))


def test_a_guard_of_the_loss_does_not_concern_the_results() -> None:
    def branching(out: Tensor, y: Tensor) -> Tensor:
        return (out - y).square().mean() if y.sum() > 0 else out.mean()

    x, y = torch.randn(8, 6, dtype=F64), torch.rand(8, 4, dtype=F64)
    model = nn.Linear(6, 4, dtype=F64)
    pm = make(model, (x,), loss=branching, targets=(y,), specs={"args.0": "dp, -"})
    (guard,) = guards(pm)
    assert guard.of_loss and guard.where.module == "loss"
    pm(x, y).backward()
    torch.testing.assert_close(pm(x), model(x))
    with pytest.raises(sx.Error, match=r"loss  test_guards.py(.|\n)*y.sum"):
        pm(x, -y)
    text = str(pm.planned)
    assert "expects True of loss" in text and str(parse_graph(text)) == text


@pytest.mark.long
def test_graph_with_other_guards_is_not_proven() -> None:
    pm = make(Net(), batch())
    assert sx.rerun.prove(pm.captured, pm.planned)
    gone = pm.planned.copy()
    gone.outputs = [output for output in gone.outputs if output.name != "guards.1"]
    assert "lacks an output" in sx.rerun.prove(pm.captured, gone).why
    other = pm.planned.copy()
    at = next(output for output in other.outputs if output.name == "guards.1")
    at.guard = Guard(4)
    assert "expects something else" in sx.rerun.prove(pm.captured, other).why
    swapped = pm.planned.copy()
    at, by = (next(o for o in swapped.outputs if o.name == name) for name in ("guards.1", "guards.0"))
    at.value = by.value
    assert "another function" in sx.rerun.prove(pm.captured, swapped).why


class ByMode(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 4, dtype=F64)
        self.register_buffer("scale", torch.ones((), dtype=F64), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x) * self.scale
        if self.training:
            return y
        return y[y.sum(1) > 0] if self.fc.weight.sum() > 1 else -y


@pytest.mark.long
def test_another_call_signature_is_planned_for_its_own_data() -> None:
    x = torch.randn(8, 6, dtype=F64)
    model = ByMode()
    pm = make(model, (x,), specs={"args.0": "dp, -"})
    with torch.no_grad():
        for weight in (model.fc.weight, *pm.get_submodule("fc").parameters(recurse=False)):
            if weight.dim() == 2:
                weight.fill_(0.1)  # the weights of the moment decide, not those of the capture
    model.eval(), pm.eval()
    with torch.no_grad():  # and no gradients are planned
        torch.testing.assert_close(pm(x), loss(model(x)))
    torch.testing.assert_close(pm(x), loss(model(x)))
    assert pm(x).shape == ()
    more = torch.randn(10, 6, dtype=F64)
    torch.testing.assert_close(pm(more), loss(model(more)))


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Block()

    def forward(self, x: Tensor, mask: Tensor, image: Tensor) -> Tensor:
        return self.inner(x, mask, image)


def test_branch_on_data_without_guard_is_refused_in_our_words_alone(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(sx.Error, match="depend on the data") as caught:
        make(Branches(), batch(), guard=False)
    assert caught.value.where is not None and caught.value.remedy is not None
    assert caught.value.where.startswith("inner  test_guards.py:") and caught.value.where.endswith("if y.sum() > 0:")
    assert "Hints(guard=True)" in caught.value.remedy
    assert capfd.readouterr() == ("", "")


class Unique(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.unique()


def test_op_that_guards_do_not_know_is_refused() -> None:
    with pytest.raises(sx.Error, match=r"depend on the data(.|\n)*ops that guards know") as caught:
        make(Unique(), (torch.randn(4),), loss=None)
    assert "x.unique()" in str(caught.value) and "guard=True" not in str(caught.value.remedy)


def test_guard_on_meta_examples_or_weights_is_an_error() -> None:
    x, mask, image = batch()
    with pytest.raises(sx.Error, match=r"no content(.|\n)*guard=True"):
        make(Net(), (x.to("meta"), mask, image))
    with pytest.raises(sx.Error, match=r"block.fc.weight(.|\n)*no content"):
        make(Net().to("meta"), (x, mask, image))


def test_saved_programs_check_their_guards(tmp_path: Path) -> None:
    pm = make(Net(), batch())
    pm.save_programs(tmp_path)
    code = (tmp_path / "rank0.py").read_text()
    space: dict[str, Any] = {}
    exec(code[code.index("INPUTS = ") : code.index("def forward")], space)
    watched = {name for name in space["OUTPUTS"] if name.startswith(OutputKind.GUARD)}
    assert set(space["GUARDS"]) == watched and len(watched) == 3
    assert [expected for expected, _ in space["GUARDS"].values()][1:] == [3, 3]

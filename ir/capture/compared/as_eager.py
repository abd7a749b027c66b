"""Is what was captured what the model computes? Code may do something else while it is traced, and torch's own forms of
ops, in which they are traced, may be others than their kernels.

    if torch.compiler.is_compiling(): ...          torch.jit.is_tracing()          isinstance(x, FakeTensor)

So a model with content is run on its example as it is, beside the graph that was captured of it, and loss, results,
gradients and buffers are compared. Where that run changes what modules hold beside parameters and buffers
(``self.calls += 1``, ``self.hidden = h``), it is run once more: what a model keeps from call to call no program keeps.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.utils.stateless import _reparametrize_module

from shardfx.ir.capture.carried.kept import attributes, keeps
from shardfx.ir.capture.intake.given import copied
from shardfx.ir.capture.intake.surroundings import Surroundings
from shardfx.ir.capture.named.left_as_found import left_as_found
from shardfx.ir.errors import Error
from shardfx.ir.graph import Graph, InputKind

from .both_runs import Draws, Made, Named, captured_run, eager_run, said_of
from .modes import Alike
from .rounding import MARGIN, OF_MOVED, OF_ROUNDING, SHARE, UNKNOWN, apart, differing, is_rounding, unit, units

MOST = 2**24
"""Elements stored and given: of a larger model a run costs more than its capture, and its user is spared it, unless
it is traced with numbers, which is a run already."""

TIMES = 3
"""Runs in which it is seen how much of what differs is rounding."""
NOT_RUN = "the model does not run on its example, so what was traced was not compared with it"


@dataclass(frozen=True)
class Difference:
    """The first of what is captured that is another number than the model's: what it is, where it is made, and both."""

    name: str
    where: str
    got: str
    expected: str
    random: bool


class AsItIs:
    """A program of a model and its loss, run on its example as it is, by torch's own autograd; once, to be compared
    with what is captured of it.

    It is run as it is when this is made, before any trace: what tracing leaves in a model is none of it. Nothing is
    run where weights or examples have no content. ``note`` says where the model does not run on its example
    (token ids that were never set, say). ``recast``: it is to compute in another dtype than its parameters'.

    ``difference`` raises that the model keeps something from call to call, or does not run in the dtype in which it is
    to compute.
    """

    def __init__(
        self,
        program: nn.Module,
        given: tuple[Tensor, ...],
        named: Named,
        around: Surroundings,
        *,
        trains: bool,
        guarded: bool = False,
        recast: bool = False,
    ) -> None:
        self._program, self._given, self._named, self._trains = program, given, named, trains
        self.note, self._recast, self._around = "", recast, around
        self._theirs: Made | Exception = {}
        everything = [*program.parameters(), *program.buffers(), *given]
        self.runs = all(each.device.type == "cpu" and not isinstance(each, FakeTensor) for each in everything)
        if not guarded and sum(each.numel() for each in everything) > MOST:
            self.runs = False
        if self.runs:
            try:
                with left_as_found(around), _stand_ins(program):
                    self._theirs = self._run()
            except Exception as error:  # which is said where nothing hinders the capture
                self._theirs = error

    @property
    def raised(self) -> Exception | None:
        """What the model raises on its example."""
        return self._theirs if isinstance(self._theirs, Exception) else None

    def difference(self, graph: Graph, drawn: Draws) -> Difference | None:
        """What of a captured graph is not what the model makes: the first, or None.

        Args:
            drawn: its values that stand for random numbers of torch's.
        """
        if not self.runs:
            return None
        random = bool(graph.of_kind(InputKind.SEED))
        theirs = self._theirs
        if isinstance(theirs, Error):
            raise theirs
        if isinstance(theirs, Exception):
            kind = type(theirs).__name__
            if isinstance(theirs, RuntimeError) and self._recast and "dtype" in str(theirs):
                raise _mixed(theirs) from theirs
            self.note = f"{NOT_RUN} ({kind}: {theirs})"
            self.runs = False
            return None
        ours = self._captured(graph, drawn, Alike() if random else None)
        fine = units(graph)
        of_output = {said_of(output): fine[output.value] for output in graph.outputs}
        far = list(differing(ours, theirs, of_output))
        if far:
            far = self._still(graph, drawn, ours, theirs, far, of_output)
        return self._said(graph, far[0], ours, theirs, random) if far else None

    def _captured(self, graph: Graph, drawn: Draws, mode: Alike | None) -> Made:
        return captured_run(graph, self._program, self._given, self._named, drawn, mode)

    def _run(self) -> Made:
        """The program run as it is, but that it draws what the captured graph does."""
        program, mode = self._program, Alike()
        kept = [attributes(program, self._around)]
        made = eager_run(program, self._given, self._named, self._trains, mode)
        kept.append(attributes(program, self._around))
        if kept[0] == kept[1]:
            return made
        again = eager_run(program, self._given, self._named, self._trains, mode)
        kept.append(attributes(program, self._around))
        changed = [name for name, value in kept[1].items() if kept[0].get(name) != value]
        counts = [name for name in changed if kept[1][name] != kept[2].get(name)]
        if counts or next(differing(again, made, {}), None) is not None:
            raise keeps(counts or changed, "another value after each call on the same input", program, self._around)
        return made

    def _still(
        self, graph: Graph, drawn: Draws, ours: Made, theirs: Made, far: list[str], units: dict[str, float]
    ) -> list[str]:
        """Which of these differ in float64 too, in view of how much float32 makes of rounding there: what cancels may
        come out as zero once, and does not where inputs are moved by a rounding."""
        dtypes = {value.type.dtype for value in graph.values() if value.type.dtype.is_floating_point}
        share, of_rounding = {name: units.get(name, 0.0) ** UNKNOWN for name in far}, 0.0
        fine, coarse, widened = ours, [ours], False
        try:
            coarse = [self._captured(graph, drawn, Alike(torch.float32, moved)) for moved in range(TIMES)]
            fine = ours if dtypes <= {torch.float64} else self._captured(graph, drawn, Alike(torch.float64))
            of_rounding = 1 / MARGIN
            if fine is not ours:
                theirs = self._widened(Alike(torch.float64))
            ours, of_rounding, widened = fine, OF_ROUNDING, True
            share = dict.fromkeys(far, unit(torch.float64) ** SHARE)
        except Exception:  # of code that takes no other precision less is known
            share = {name: units.get(name, 0.0) ** UNKNOWN for name in far}
        left = [
            name
            for name in far
            if not all(name in run for run in (ours, theirs, *coarse, fine))
            or not is_rounding(
                ours[name], theirs[name], share[name], of_rounding * max(_most(run[name], fine[name]) for run in coarse)
            )
        ]
        if not left or not widened or not all(name in run for name in left for run in (ours, theirs)):
            return left
        runs = [self._captured(graph, drawn, Alike(torch.float64, moved)) for moved in range(1, TIMES)]
        moved = {name: OF_MOVED * max(_most(run[name], ours[name]) for run in runs) for name in left}
        return [name for name in left if not is_rounding(ours[name], theirs[name], share[name], moved[name])]

    def _widened(self, mode: Alike) -> Made:
        own = copied(self._program, {})._apply(mode.cast)  # `to` would make complex parameters real
        given = [mode.cast(each.detach()).requires_grad_(each.requires_grad) for each in self._given]
        return eager_run(own, given, self._named, self._trains, mode)

    def _said(self, graph: Graph, name: str, ours: Made, theirs: Made, random: bool) -> Difference:
        output = next((each for each in graph.outputs if said_of(each) == name), None)
        place = (output.value.where if output is not None else None) or ""
        mine, other = ours.get(name), theirs.get(name)
        got, expected = ("nothing" if each is None else f"shape {tuple(each.shape)}" for each in (mine, other))
        if mine is not None and other is not None and mine.shape == other.shape:
            at = int(apart(mine, other).flatten().argmax())
            got, expected = (f"{each.flatten()[at].item():.6g}" for each in (mine, other))
        return Difference(name, str(place), got, expected, random)


@contextmanager
def _stand_ins(program: nn.Module) -> Iterator[None]:
    """Within, a program has parameters and buffers of its own, which may be changed and have no hooks."""
    made: dict[int, Tensor] = {}

    def stand_in(tensor: Tensor) -> Tensor:
        own = tensor.detach().clone()
        return nn.Parameter(own, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else own

    names = (*program.named_parameters(remove_duplicate=False), *program.named_buffers(remove_duplicate=False))
    tensors = {name: made.setdefault(id(each), stand_in(each)) for name, each in names}
    with _reparametrize_module(program, tensors):
        yield


def _most(ours: Tensor, theirs: Tensor) -> float:
    far = apart(ours, theirs)
    return far.max().item() if far.numel() else 0.0


def _mixed(error: RuntimeError) -> Error:
    return Error(
        "the model does not run in the dtype in which it is to compute",
        where="Hints(compute=...)",
        expected="a model that casts what it keeps in another dtype, such as a buffer, before it multiplies by it",
        got=str(error).splitlines()[0],
        remedy="register such buffers in that dtype, or cast them in forward; or name the modules that compute as they "
        "are: Compute(..., keep=...)",
    )

"""Is what was captured what the model computes? Code may do something else while it is traced, and torch's own forms of
ops, in which they are traced, may be others than their kernels.

    if torch.compiler.is_compiling(): ...          torch.jit.is_tracing()          isinstance(x, FakeTensor)

So a model with content is run on its example as it is, beside the graph that was captured of it, and loss, results,
gradients and buffers are compared. Where that run changes what modules hold beside parameters and buffers
(``self.calls += 1``, ``self.hidden = h``), it is run once more: what a model keeps from call to call no program keeps.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from shardfx.ir.capture.intake.contents import STATE, Contents
from shardfx.ir.capture.intake.given import copied
from shardfx.ir.capture.intake.surroundings import Surroundings
from shardfx.ir.capture.named.code_names import Names
from shardfx.ir.errors import Error
from shardfx.ir.graph import Graph, InputKind

from .both_runs import Draws, Made, Named, captured_run, eager_run, said_of
from .modes import Alike
from .rounding import MARGIN, OF_ROUNDING, SHARE, UNKNOWN, apart, differing, is_rounding, unit, units

MODEL = "model."
"""Where the model stands in a program of it and its loss."""
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

    Raises:
        Error: the model keeps something from call to call, or does not run in the dtype in which it is to compute.
    """

    def __init__(
        self, program: nn.Module, given: tuple[Tensor, ...], named: Named, trains: bool, guarded: bool, recast: bool
    ) -> None:
        self._program, self._given, self._named, self._trains = program, given, named, trains
        self.note, self._recast = "", recast
        self._made: dict[bool, Made] = {}
        everything = [*program.parameters(), *program.buffers(), *given]
        self.runs = all(each.device.type == "cpu" and not isinstance(each, FakeTensor) for each in everything)
        if not guarded and sum(each.numel() for each in everything) > MOST:
            self.runs = False
        self._own = copied(program, {}) if self.runs else program

    def difference(self, graph: Graph, drawn: Draws) -> Difference | None:
        """What of a captured graph is not what the model makes: the first, or None.

        Args:
            drawn: its values that stand for random numbers of torch's.
        """
        if not self.runs:
            return None
        random = bool(graph.of_kind(InputKind.SEED))
        try:
            theirs = self._eager(random)
        except Error:
            raise
        except Exception as error:
            kind = type(error).__name__
            if isinstance(error, RuntimeError) and self._recast and "dtype" in str(error):
                raise _mixed(error) from error
            self.note = f"{NOT_RUN} ({kind}: {error})"
            self.runs = False
            return None
        ours = self._captured(graph, drawn, Alike() if random else None)
        fine = units(graph)
        of_output = {said_of(output): fine[output.value] for output in graph.outputs}
        far = list(differing(ours, theirs, of_output))
        if far:
            far = self._still(graph, drawn, ours, theirs, far, of_output)
        return self._said(graph, far[0], ours, theirs, random) if far else None

    def _eager(self, random: bool) -> Made:
        if random not in self._made:
            self._made[random] = self._run(Alike() if random else None)
        return self._made[random]

    def _captured(self, graph: Graph, drawn: Draws, mode: Alike | None) -> Made:
        return captured_run(graph, self._program, self._given, self._named, drawn, mode)

    def _run(self, mode: Alike | None) -> Made:
        own = self._own
        around = Surroundings(own.get_submodule("model"), getattr(own, "loss", None))
        kept = [_attributes(own, around)]
        made = eager_run(own, self._given, self._named, self._trains, mode)
        kept.append(_attributes(own, around))
        if kept[0] == kept[1]:
            return made
        again = eager_run(own, self._given, self._named, self._trains, mode)
        kept.append(_attributes(own, around))
        changed = [name for name, value in kept[1].items() if kept[0].get(name) != value]
        counts = [name for name in changed if kept[1][name] != kept[2].get(name)]
        if counts or next(differing(again, made, {}), None) is not None:
            raise _keeps(counts or changed)
        return made

    def _still(
        self, graph: Graph, drawn: Draws, ours: Made, theirs: Made, far: list[str], units: dict[str, float]
    ) -> list[str]:
        """Which of these differ in float64 too, in view of how much float32 makes of rounding there: what cancels may
        come out as zero once, and does not where inputs are moved by a rounding."""
        dtypes = {value.type.dtype for value in graph.values() if value.type.dtype.is_floating_point}
        share, of_rounding = {name: units.get(name, 0.0) ** UNKNOWN for name in far}, 0.0
        fine, coarse = ours, [ours]
        try:
            coarse = [self._captured(graph, drawn, Alike(torch.float32, moved)) for moved in range(TIMES)]
            fine = ours if dtypes <= {torch.float64} else self._captured(graph, drawn, Alike(torch.float64))
            of_rounding = 1 / MARGIN
            if fine is not ours:
                theirs = self._widened(Alike(torch.float64))
            ours, of_rounding = fine, OF_ROUNDING
            share = dict.fromkeys(far, unit(torch.float64) ** SHARE)
        except Exception:  # of code that takes no other precision less is known
            share = {name: units.get(name, 0.0) ** UNKNOWN for name in far}
        return [
            name
            for name in far
            if not all(name in run for run in (ours, theirs, *coarse, fine))
            or not is_rounding(
                ours[name], theirs[name], share[name], of_rounding * max(_most(run[name], fine[name]) for run in coarse)
            )
        ]

    def _widened(self, mode: Alike) -> Made:
        own = copied(self._own, {}).to(torch.float64)
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


def _most(ours: Tensor, theirs: Tensor) -> float:
    far = apart(ours, theirs)
    return far.max().item() if far.numel() else 0.0


def _attributes(program: nn.Module, around: Surroundings) -> dict[str, str]:
    """What modules hold beside parameters, buffers and modules, as text (of a tensor, that there is one); and what the
    code reads beside these."""
    said = Contents(Names()).said
    own = {
        f"{path}.{name}".removeprefix(MODEL): said(value)
        for path, module in program.named_modules()
        for name, value in vars(module).items()
        if name not in STATE
    }
    return own | around.named()


def _keeps(names: list[str]) -> Error:
    return Error(
        "the model keeps something from call to call",
        where=", ".join(names),
        expected="a forward that changes no attributes of modules, or none that the next call sees",
        got="another value after each call on the same input",
        remedy="make it a buffer: self.register_buffer(name, torch.tensor(0)), and self.name.add_(1) in forward; or "
        "hand it in as an argument, and give it back with the results",
    )


def _mixed(error: RuntimeError) -> Error:
    return Error(
        "the model does not run in the dtype in which it is to compute",
        where="Hints(compute=...)",
        expected="a model that casts what it keeps in another dtype, such as a buffer, before it multiplies by it",
        got=str(error).splitlines()[0],
        remedy="register such buffers in that dtype, or cast them in forward; or name the modules that compute as they "
        "are: Compute(..., keep=...)",
    )

"""Hints, the user's input to a plan: example inputs, the loss, and how a few values are sharded.

``Hints(grad_accumulation=4)``: a loop axis that shards the batch, outermost, as if mesh and hints had said so.

The micro-batches of ``Hints(pipeline=...)`` shard the batch too, where no hint says what they shard.

>>> hints = Hints(args=(x,), specs={"args.0": "dp, -"}, grad_accumulation=4)
>>> mesh = with_iterations(Mesh(dp=2), hints)
>>> mesh, specs_in_iterations(mesh, hints)["args.0"]
(Mesh(mb=Loop(4), dp=2), [.{mb,dp}, .])
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from shardfx.ir.capture.canonical.mixed_precision import MixedPrecision
from shardfx.ir.capture.model_and_loss import leaf_names
from shardfx.ir.capture.optimizer.optimizer_groups import Parameters
from shardfx.ir.cost.machine import Machine
from shardfx.ir.dim_sharding import DimSharding
from shardfx.ir.errors import Error
from shardfx.ir.mesh import Loop, Mesh
from shardfx.ir.names import pattern
from shardfx.ir.rules.book import RuleEntry
from shardfx.ir.spec import Spec
from shardfx.passes import Offload, Pass, Pipeline, Recompute
from shardfx.passes.pass_text import check_options
from shardfx.passes.rank import RankPass
from shardfx.passes.sharding.bind_hints import as_spec

SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([kKMGTP])(i?))?B?")


@dataclass(frozen=True)
class Hints:
    """The options of :func:`shardfx.parallelize`, besides the model and the mesh.

    Args:
        args, kwargs: example inputs of the model, of the *global* batch; fake tensors will do.
        loss: ``loss(out, *targets)``, a scalar; None for inference.
        targets: further inputs, of the loss.
        specs: name or pattern -> placement. Names are those of ``named_parameters()``, ``args.N``, ``kwargs.NAME``,
            ``targets.N``, or a module's path for its output; ``*`` stands for one part of a name, ``**`` for any. A
            placement is text (per dim the mesh axes, major first, or ``-``: ``"dp tp, -"``), DTensor placements, one
            per mesh axis, or a ``Spec``: that says how a parameter is stored (``zero`` shards it further), and wins
            over the others. A module's path may take a :class:`shardfx.Context`, context parallelism of its attention,
            or :class:`shardfx.Experts`, expert parallelism of its experts.
        strategies: how ops are sharded, said on the ops themselves: module path, or ``path:op`` (patterns as in
            ``specs``) -> axes by factor of the op's rule, in the words in which graphs are printed (``"n{tp} m{}"``;
            factors not named are free, ``m{}`` is replicated). Without an op the module's products are meant. The
            backward of the op follows.
        strict: an op without a sharding rule is an error, not a warning.
        bucket_mb: collectives of one kind are coalesced up to so many megabytes; 0 leaves them alone.
        passes: further passes: instances, or text such as ``"count-nodes{mb=2}"`` for those of installed plugins. Each
            stands in its slot among the built-in ones (without one, before ``order``); one with the name of a built-in
            pass takes its place. With ``propagate`` among them they are the whole pipeline, and ``strict`` and
            ``bucket_mb`` are its passes' options (see docs/writing_passes.md).
        machine: what a rank runs on: a :class:`shardfx.Machine`, the name of a known one (``"h100-dgx"``), or the path
            of a file that describes one. Axes whose link the mesh does not state have those of the machine, by which
            communication is chosen; and reports are in its seconds.
        device: where the programs run: ``"cpu"``, ``"cuda"``, ``"cuda:1"``; by default where the model's weights are
            (the CPU for those on ``meta``). Under ``torchrun`` ``"cuda"`` is the device of the local rank. One that is
            not there is an error, but for a model without weights: its report, memory and timeline need none, and the
            error comes when weights are loaded.
        max_specializations: how many call signatures (batch sizes, modes, ...) beside the captured one are planned; a
            further one is an error.
        rules: op rules of your own, as :func:`shardfx.rule` gives them; they win over built-in ones and plugins'. They
            are executed at planning as the plan uses them, and a wrong one is an error (see also
            :func:`shardfx.check_rule`).
        rank_passes: further passes on the ranks' programs, run behind the built-in ones: instances of
            :class:`shardfx.RankPass`, or text for those of installed plugins.
        guard: a model whose code depends on the data (``if x.sum() > 0``, ``.item()``, ``x[mask]``) is captured as it
            runs for the examples, which must be real, as must be the weights. Every call then checks that each
            condition and each such size is as it was: another branch is an error, and no wrong number.
        zero: 1, 2, 3: optimizer states, gradients, parameters too are sharded over ``zero_axis`` (a mesh axis, or
            several, major first): each rank stores its shard of every parameter, which is what ``pm.parameters()`` are.
            They are gathered for a step (1, 2), or for each use in forward and backward (3); gradients are reduced and
            scattered as they come. With ``optimizer``, 1 and 2 store full parameters, once, and gather new ones.
            Parameters of fewer than ``zero_min_numel`` elements stay as they are.
        memory: what a rank may hold at most in a step, in bytes or as text (``"16GiB"``, ``"80GB"``): a plan that holds
            more is an error that says what would make it fit.
        recompute: modules (patterns) whose forward is run again for the backward instead of being kept; a
            :class:`shardfx.Recompute` says what of them stays; or several of either. ``"auto"``: what makes the plan
            fit into ``memory`` at the least cost. By default what the model's own code checkpoints
            (``torch.utils.checkpoint``); ``()``: nothing.
        offload: what is offloaded into the host's memory while it waits, and fetched shortly before it is needed:
            ``"activations"`` (what the forward made for the backward, of which ``recompute`` leaves where it starts),
            ``"rows"`` (tables that are looked up in stay there, with their states: rows are fetched), ``"optimizer"``
            (states, which are on the device during their update alone), ``"parameters"`` (fetched for each of forward,
            backward and update); a :class:`shardfx.Offload` says how, and to where (``to="disk"``: files). What
            ``memory`` allows is the device's; ``pm.memory().host`` is what lies beside it at most.
        optimizer: makes the optimizer of the parameters that it is given, in a list that has them by name too
            (``params.named``): ``lambda params: torch.optim.AdamW(params, lr=3e-4)``. Its step becomes a part of the
            program: ``pm.step(x, y)`` runs a full step, and ``pm.optimizer`` has groups, rates and states. It may give
            a list of optimizers that share no parameter.
        scheduled_options: options of the optimizer's groups that change from step to step beside ``lr``: ``("betas",)``
            for ``OneCycleLR``, ``("weight_decay", "momentum")``. What is not named here stays as it was planned.
        clip_grad_norm: the most that the norm of all gradients together may be; they are scaled down where it is more,
            before the optimizer's step, or (without ``optimizer``) before they are handed out.
        mixed_precision: the dtype in which the model computes, beside that of its parameters, which are the master
            weights of optimizer and checkpoints: parameters and floating inputs are cast, gathers of ``zero`` are in
            it, and gradients are summed in float32. :class:`shardfx.MixedPrecision` says what is cast, and has further
            options.
        check_inputs: under ``torchrun``, at every call it is checked that ranks pass the same where they should (by a
            checksum); otherwise on the first, second, fourth, eighth ... call of each specialization. ``"broadcast"``:
            nothing is checked, and of the ranks that should pass the same, the first one's inputs are taken.
        batch_stats: ``"local"``: in training a batch norm has the statistics of each rank's own part of the batch, as
            under ``DistributedDataParallel``: that is another model than on one device, and what ``pm.verify()``
            proves. Running statistics take the mean over the parts, and are all that is sent for it. By default
            they are those of the global batch. ``"microbatch"``: of each iteration's part, over all ranks; running
            statistics are what one iteration after the other makes of them (a step counts as one batch).
        grad_accumulation: into how many micro-batches a rank splits its part of the batch; their gradients are added.
            Loss and gradients are those of the global batch. It is the short form of a loop axis in the mesh,
            ``Mesh(mb=sx.Loop(4), dp=2)``, which shards batches first: ``"mb dp, -"``.
        reduce: when gradients of iterations are reduced among ranks: ``"last"``, once behind all iterations;
            ``"each"``, in each iteration, so that a rank adds up its shards alone; ``"auto"``: what is faster and fits,
            where gradients leave sharded (``zero``) and ``memory`` or ``machine`` says what a rank may hold; else in
            each with ``zero`` 2, 3.
        arena: buckets, what is gathered, and temporaries lie in one memory, at places that follow from when they are
            needed; its size, and the most that lies in it at once, stand in ``pm.report()``. The peak falls with
            ``zero=3`` and may rise otherwise: ask ``pm.memory()``. ``pm.compile()``, where torch plans memory, refuses
            it.
        pipeline: a :class:`shardfx.Pipeline`: the model is split into stages, which lie on the ranks of an axis.

    Example::

        Hints(args=(x,), loss=F.cross_entropy, targets=(y,), specs={"args.0": "dp, -", "**.w1.weight": "tp, -"})
    """

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    loss: Callable[..., Any] | None = None
    targets: tuple[Any, ...] = ()
    specs: Mapping[str, Any] = field(default_factory=dict)
    strategies: Mapping[str, Any] = field(default_factory=dict)
    strict: bool = False
    bucket_mb: float | int = 25.0
    passes: Sequence[Pass | str] = ()
    machine: Machine | str | None = None
    rules: Sequence[RuleEntry] = ()
    rank_passes: Sequence[RankPass | str] = ()
    device: str | torch.device | None = None
    max_specializations: int = 8
    guard: bool = False
    check_inputs: bool | Literal["broadcast"] = False
    batch_stats: Literal["local", "microbatch"] | None = None
    zero: Literal[0, 1, 2, 3] = 0
    zero_axis: str | Sequence[str] = "dp"
    zero_min_numel: int = 2**14
    recompute: str | Recompute | Sequence[str | Recompute] | None = None
    memory: int | str | None = None
    optimizer: Callable[[Parameters], Any] | None = None
    clip_grad_norm: float | int | None = None
    scheduled_options: Sequence[str] = ()
    mixed_precision: MixedPrecision | torch.dtype | None = None
    offload: Sequence[str | Offload] = ()
    grad_accumulation: int = 1
    reduce: Literal["last", "each", "auto"] = "auto"
    pipeline: Pipeline | None = None
    arena: bool = False

    def __post_init__(self) -> None:
        check_options(self, bucket_mb=0, zero_min_numel=0, grad_accumulation=1, max_specializations=1)
        for name, (fits, expected) in FURTHER.items():
            if not fits(getattr(self, name)):
                raise Error(
                    f"Hints({name}=...) is not valid",
                    where=f"Hints({name}=...)",
                    expected=expected,
                    got=f"{getattr(self, name)!r:.100}",
                    remedy="see help(shardfx.Hints)",
                )
        MixedPrecision.of(self.mixed_precision), Machine.of(self.machine)  # which says so if there is none of that name


def _is_device(value: Any) -> bool:
    try:
        return value is None or bool(torch.device(value))
    except RuntimeError:
        return False


def bytes_of(value: Any) -> int:
    """A number of bytes, as such or as text (``"16GiB"``, ``"500 MB"``); 0 where it is neither."""
    if type(value) is int:
        return value
    found = SIZE.fullmatch(value) if isinstance(value, str) else None
    if found is None:
        return 0
    number, prefix, binary = found.groups()
    return int(float(number) * (1024 if binary else 1000) ** " KMGTP".index((prefix or " ").upper()))


FURTHER: dict[str, tuple[Callable[[Any], bool], str]] = {
    "device": (_is_device, "the name of a device of torch, such as 'cuda', or None"),
    "zero_axis": (bool, "the name of a mesh axis, or a tuple of such"),
    "memory": (lambda given: given is None or bytes_of(given) > 0, "a number of bytes, or text such as '16GiB'"),
    "clip_grad_norm": (lambda given: given is None or given > 0, "a norm above zero, or None"),
}
"""What a field must be beside its type, and that in words."""


# ---- iterations -----------------------------------------------------------------------------------------------------


NAMES = ("mb", "micro_batch", "accumulate")
"""What the axis is called: the first of these that the mesh does not have."""


def with_iterations(mesh: Mesh, hints: Hints) -> Mesh:
    """The mesh with the axis that ``grad_accumulation`` asks for, outermost."""
    if hints.grad_accumulation == 1:
        return mesh
    axes: dict[str, Any] = {next(name for name in NAMES if name not in mesh.names): Loop(hints.grad_accumulation)}
    axes |= {each.name: each.extent for each in mesh.axes}
    return Mesh(links={each.name: each.link for each in mesh.axes}, **axes)


def specs_in_iterations(mesh: Mesh, hints: Hints) -> Mapping[str, Any]:
    """The specs of hints on such a mesh: the axis of micro-batches stands in front of those that shard the leading dim
    of an input, or else shardings that of the first input.

    Raises:
        Error: no input has a batch to shard.
    """
    leaves = leaf_names(hints.args, hints.kwargs, hints.targets)
    inputs = {name: leaf.ndim for name, leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.ndim}
    axis = _unsaid(mesh, hints, inputs)
    if not axis:
        return hints.specs
    specs, found = dict(hints.specs), False
    for text, hint in hints.specs.items():
        ndim = next((dims for name, dims in inputs.items() if pattern(text).fullmatch(name)), None)
        spec = as_spec(hint, mesh, ndim, text) if ndim is not None else None
        if spec is not None and spec.dims[0].axes and axis not in spec.axes:
            specs[text], found = _before(axis, spec, hint), True
    if found:
        return specs
    first = next((name for name in inputs if not name.startswith("targets.")), None)
    if first is None:
        raise Error(
            "there is no batch to split into micro-batches",
            where=f"Hints(grad_accumulation={hints.grad_accumulation})"
            if hints.grad_accumulation > 1
            else "Hints(pipeline=...)",
            expected="an input of the model whose leading dim is the batch",
            got=f"inputs {', '.join(inputs) or 'without dims'}",
            remedy="say which dim it is: Mesh(mb=sx.Loop(4), ...), and mb in the specs of inputs",
        )
    by = next((text for text in specs if pattern(text).fullmatch(first)), first)
    given = as_spec(specs[by], mesh, inputs[first], by) if by in specs else Spec.replicated(inputs[first])
    return {**specs, by: given if axis in given.axes else _before(axis, given, specs.get(by))}


def _unsaid(mesh: Mesh, hints: Hints, inputs: Mapping[str, int]) -> str:
    """The axis of micro-batches of which no hint says what it shards; empty where there is none."""
    if hints.grad_accumulation > 1:
        return mesh.axes[0].name
    time = hints.pipeline.microbatches if hints.pipeline is not None else ""
    if time not in mesh.names or not mesh[time].loop:
        return ""  # or it is no axis of micro-batches, which the pass will say
    said = (
        as_spec(hint, mesh, dims, text)
        for text, hint in hints.specs.items()
        for name, dims in inputs.items()
        if pattern(text).fullmatch(name)
    )
    return "" if any(time in spec.axes for spec in said) else time


def _before(axis: str, spec: Spec, hint: Any) -> Spec | str:
    """With the axis first; a text stays one, of which passes may choose stripes."""
    if isinstance(hint, str) and not any(each.parts for each in spec.dims):
        return ", ".join(
            [" ".join([axis, *spec.dims[0].axes]), *(" ".join(each.axes) or "-" for each in spec.dims[1:])]
        )
    return spec.with_dim(0, DimSharding((axis, *spec.dims[0].axes)))

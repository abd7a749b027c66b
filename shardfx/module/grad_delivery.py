"""Autograd edges of a parallel module: precomputed gradients of a loss, and the VJP of the model's results.

    out = pm(x)                                   the forward program
    other_loss(out).backward()                    gradients of the results come in; a program that recomputes the
                                                  forward, then runs the backward for them

The second program is planned as any other: its loss is the product of results and incoming gradients, which are its
targets. The same random numbers are drawn again, and buffers are as they were before the forward.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn

from shardfx.compile import Compiled
from shardfx.gradients import gradients_of, is_pulled
from shardfx.ir.errors import Error
from shardfx.ir.graph import OutputKind
from shardfx.module.call_signature import TARGETS, CallSignature, ModuleCall, input_key
from shardfx.module.sparse_steps import touch, touched_rows
from shardfx.runtime.distributed.dtensor_shard import DTensorShard
from shardfx.runtime.step import ProgramRunner, Results, RunStart
from shardfx.runtime.store import Store, version


class GradientEdge(torch.autograd.Function):
    """An autograd function of tensors that programs made, whose VJP is ``pull``."""

    @staticmethod
    def forward(ctx: Any, pull: Callable[..., Any], made: list[torch.Tensor], *tensors: torch.Tensor) -> Any:
        """What was made, as outputs of an autograd node with inputs ``tensors``."""
        ctx.pull = pull
        return tuple(each.clone() if each._is_view() else each for each in made)

    @staticmethod
    @torch._disable_dynamo
    def backward(ctx: Any, *above: torch.Tensor) -> Any:
        """The gradients of the tensors.

        Raises:
            Error: these are to have gradients again; or ``pull`` says why there are none.
        """
        reject_second(above)
        return (None, None, *(ctx.pull(above) or [None for _ in ctx.needs_input_grad[2:]]))


@dataclass
class GradientDelivery:
    """The VJP of a loss with precomputed gradients: it hands them out, times that of the loss, and keeps none.

    A gradient that nobody else holds becomes ``parameter.grad`` itself; one that is held would be copied.
    """

    grads: list[torch.Tensor | None] | None
    note: Callable[[torch.Tensor | float], None]
    rows: dict[torch.Tensor, torch.Tensor]

    def __call__(self, above: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        (scale,), grads = above, self.grads
        if grads is None:
            raise Error(
                "the gradients of this loss were handed out already",
                where="loss.backward()",
                expected="one backward per pm(...)",
                got="another one",
                remedy="call pm(...) again, or keep them: loss.backward(retain_graph=True)",
            )
        self.note(scale)
        touch(self.rows)
        if torch._C._autograd._get_current_graph_task_keep_graph():
            return [g if g is None else g * scale for g in grads]
        self.grads = None
        if scale.device.type != "cpu" or float(scale) != 1.0:  # to read it from another device takes longer
            _multiply([g for g in grads if g is not None], scale)
        return grads


def _multiply(grads: Iterable[torch.Tensor], scale: torch.Tensor) -> None:
    """Multiply gradients in place, by one call for each device."""
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for grad in map(DTensorShard.unwrap, grads):
        by_device.setdefault(grad.device, []).append(grad)
    for device, each in by_device.items():
        torch._foreach_mul_(each, scale.to(device))


Wanted = Mapping[str, torch.Tensor | None]
"""The tensors that require a gradient by name; None: of another process."""


def trained(store: Store) -> dict[str, torch.Tensor | None]:
    """The trainable parameters."""
    elsewhere: dict[str, torch.Tensor | None] = dict.fromkeys(sorted(store.trained_elsewhere))
    return elsewhere | {name: each for name, each in store.parameters.items() if each.requires_grad}


def leaves(wanted: Wanted) -> list[torch.Tensor]:
    """The tensors that require a gradient. Where only other processes have some, one that gets none, so that a backward
    begins on all ranks alike."""
    tensors = [tensor for tensor in wanted.values() if tensor is not None]
    return tensors or [torch.zeros((), requires_grad=True) for _ in list(wanted)[:1]]


def gradients(
    step: ProgramRunner, call: ModuleCall, local: bool, wanted: Wanted, results: Results
) -> list[torch.Tensor | None]:
    """The gradients of all tensors that require one; an input's is global, as the input is unless ``local``."""
    outputs = {output.name: output for output in step.graph.outputs if output.kind is OutputKind.GRADIENT}
    grads: list[torch.Tensor | None] = []
    for name in (name for name, tensor in wanted.items() if tensor is not None):
        made = results.get((OutputKind.GRADIENT, name))
        if made is None:
            grads.append(None)
        elif name not in call.leaves:
            grads.append(step.store.gradient(outputs[name], made))
        else:
            grads.append(made[0] if local else step.full(outputs[name], made))
    return grads


def loss_with_grads(
    step: ProgramRunner, call: ModuleCall, local: bool, wanted: Wanted, results: Results
) -> torch.Tensor:
    """The loss, with gradients ready for all tensors that require one."""
    tensors = leaves(wanted)
    grads = gradients(step, call, local, wanted, results) or [None for _ in tensors]
    loss = results[OutputKind.LOSS, "loss"][0].clone()
    delivery = GradientDelivery(grads, step.store.handed_out, touched_rows(step, results))
    return attach(loss, delivery, tensors)  # type: ignore[no-any-return]


def check_step(
    compiled: Compiled,
    parameters: Mapping[str, nn.Parameter],
    loss_with_grads: Collection[str],
    has_targets: bool,
) -> None:
    """A call may be a full step: the parameters that want a gradient are those that the optimizer was planned for, and
    nobody waits for their gradients.

    Raises:
        Error: they are others; one has a hook; or there is no loss, without targets.
    """
    if not has_targets:
        raise Error(
            "a step needs a loss, and so the loss's targets",
            where="pm.step(...)",
            expected="the targets behind the model's arguments: pm.step(x, y)",
            got="a call that gives the model's results",
        )
    for name, parameter in parameters.items():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise Error(
                f"{name!r} has a hook on its gradient, which would never be called",
                where="pm.step(...)",
                expected="parameters without hooks: a step has its gradients within",
                got="a hook that was registered after parallelize",
                remedy="pm(x, y).backward() calls it, with an optimizer of pm.parameters(); or remove the hook",
            )
    update = compiled.captured.update
    assert update is not None
    planned = gradients_of(compiled.before) & {name for group in update.groups for name in group.names}
    frozen, more = sorted(planned - set(loss_with_grads)), sorted(set(loss_with_grads) - gradients_of(compiled.before))
    if frozen or more:
        says = f"{len(frozen)} of them with" if frozen else f"{len(more)} more without"
        raise Error(
            f"{(frozen or more)[0]!r} was {'frozen' if frozen else 'made trainable'} since its step was planned",
            where="pm.step(...)",
            expected="the parameters that were trained when the model was parallelized",
            got=f"{says} requires_grad=False",
            remedy="say it in the model, parallelize it again, and carry states over by pm.optimizer.full_state_dict()",
        )


def vjp_call(
    call: ModuleCall, form: CallSignature, tensors: Sequence[torch.Tensor], wanted: frozenset[str]
) -> tuple[ModuleCall, CallSignature]:
    """The VJP call: the call with the gradients of its results as targets."""
    named = {f"{TARGETS}{i}": tensor for i, tensor in enumerate(tensors)}
    inputs = {**form.inputs, **{name: input_key(tensor) for name, tensor in named.items()}}
    call = replace(call, targets=tuple(tensors), leaves={**call.leaves, **named}, has_targets=True)
    return call, replace(form, inputs=inputs, gradients=wanted, pulls=True)


@dataclass(frozen=True)
class ForwardSnapshot:
    """The inputs and buffers of a forward, so that it can be run again."""

    tensors: tuple[torch.Tensor, ...]
    versions: tuple[int, ...]
    kept: RunStart

    @staticmethod
    def of(step: ProgramRunner, tensors: Sequence[torch.Tensor], seed: torch.Tensor | None) -> ForwardSnapshot:
        """A snapshot: the versions of these tensors, and copies of the buffers that the forward writes."""
        written = {output.name for output in step.graph.outputs if output.kind is OutputKind.BUFFER}
        copies: dict[int, torch.Tensor] = {}
        buffers = {}
        for name in filter(step.store.is_here, written):
            for rank in step.ranks:
                shard = step.store.shard(name, rank)
                buffers[name, rank] = copies.setdefault(shard.data_ptr(), shard.clone())
        return ForwardSnapshot(tuple(tensors), tuple(version(t) for t in tensors), RunStart(seed, buffers))

    def check(self) -> None:
        """Raise if tensors that the forward used were modified.

        Raises:
            Error: a parameter or an input has changed since.
        """
        changed = [t for t, known in zip(self.tensors, self.versions, strict=True) if version(t) != known]
        if changed:
            raise Error(
                "a parameter or an input of pm(...) was changed in place before the backward of its results",
                where="backward() through pm(...)",
                expected="the tensors of the forward, as they were",
                got=f"{len(changed)} of {len(self.tensors)} written to since",
                remedy="step the optimizer after the backward; or call pm(...) again",
            )


def reject_second(above: Sequence[torch.Tensor | None]) -> None:
    """Refuse double backward and batched gradients.

    Raises:
        Error: the backward that is running was asked for ``create_graph``, or is of a batch of gradients.
    """
    inside = torch._C._functorch
    if any(inside.is_batchedtensor(t) or inside.is_legacy_batchedtensor(t) for t in above if t is not None):
        raise Error(
            "the gradients of pm(...) are asked for in a batch, and programs compute one of them",
            where="torch.autograd.grad(..., is_grads_batched=True), or torch.func.vmap",
            expected="a backward for each",
            got="a batch of gradients",
            remedy="a loop of torch.autograd.grad(..., retain_graph=True); or transform the model itself: "
            "with pm.gathered() as model: ...",
        )
    if torch.is_grad_enabled():
        raise Error(
            "the gradients of pm(...) have no gradients themselves",
            where="backward(create_graph=True)",
            expected="gradients that are used as they are",
            got="create_graph=True",
            remedy="compute what needs second derivatives (a gradient penalty) on the model itself",
        )


def attach(out: Any, pull: Callable[..., Any], tensors: Sequence[torch.Tensor]) -> Any:
    """What programs made, whose backward calls ``pull`` for the gradients of ``tensors``."""
    leaves, tree = pytree.tree_flatten(out)
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and is_pulled(leaf.dtype)]
    if places:
        made = GradientEdge.apply(pull, [leaves[i] for i in places], *tensors)  # type: ignore[no-untyped-call]
        for i, tensor in zip(places, made, strict=True):
            leaves[i] = tensor
    return pytree.tree_unflatten(leaves, tree)


def reject_part() -> None:
    """Refuse a backward through results that only this rank has: always an Error."""
    raise Error(
        "the results of pm(...) are this rank's part, and how a loss of them counts is not known",
        where="backward() through pm(...)",
        expected="inputs of the global batch, whose results are replicated on every rank",
        got="this rank's own part of them",
        remedy="pass the global batch; or give pm the loss: use pm(x, y)",
    )


def refuse(above: Mapping[str, torch.Tensor] | Sequence[torch.Tensor]) -> Any:
    """Refuse a backward through results that came beside a loss: always an Error."""
    raise Error(
        "results that came beside a loss have no gradient",
        where="backward() through pm(..., with_results=True)",
        expected="the loss alone to be differentiated",
        got="a gradient of the results",
        remedy="say the full loss in Hints(loss=...); or use pm(x) and a loss of its results",
    )


def reject_without_loss(trains: bool) -> None:
    """Refuse ``with_results`` where a call returns results anyway.

    Raises:
        Error: there is no loss in this call.
    """
    if not trains:
        raise Error(
            "there is no loss for results to come beside",
            where="pm(..., with_results=True)",
            expected="Hints(loss=...), and its targets behind the model's arguments",
            got="a call that gives the model's results",
            remedy="leave with_results out",
        )

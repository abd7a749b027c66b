"""Capture: from a user's module to one functional graph of forward, loss and backward.

``torch.export`` (non-strict) keeps the names of modules and lines; AOTAutograd then writes the backward beside
the forward; :mod:`shardfx.ir.builder` turns that into our IR. Nothing is computed: weights may be fake, or on
``meta``, and examples may be fake.

    >>> captured = capture(model, Mesh(dp=2), args=(x,), loss=F.cross_entropy, targets=(y,))
    >>> print(captured.graph)
"""

from __future__ import annotations

import copy
import linecache
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from shardfx.ir.errors import Error
from shardfx.ir.graph import Graph, Where
from shardfx.ir.mesh import Mesh
from shardfx.ir.unfold import Irregular, check_regular

from .convert import Names, convert
from .repeats import TRACED_WHOLE, Shortened, find_repeats
from .sources import source_of

aten = torch.ops.aten


DECOMPOSED = (
    aten.mse_loss,
    aten.mse_loss_backward,
    aten.smooth_l1_loss,
    aten.smooth_l1_loss_backward,
    aten.huber_loss,
    aten.huber_loss_backward,
    aten.binary_cross_entropy,
    aten.binary_cross_entropy_backward,
    aten.binary_cross_entropy_with_logits,
    aten.soft_margin_loss,
    aten.soft_margin_loss_backward,
    aten.std,
    aten.std_mean,
    aten.var,
    aten.var_mean,
    aten.linalg_vector_norm,
    aten.logsumexp,
    aten.log_sigmoid_forward,
    aten.log_sigmoid_backward,
    aten.nan_to_num,
)
"""Ops whose result is a mean over everything, or a statistic of a dim: taken apart at once into sums and pointwise
ops."""


@dataclass(frozen=True)
class Captured:
    """A captured model: the graph, and how the leaves of inputs and results are arranged.

    ``leaves`` are the names (``args.0``) of the tensor inputs, in order; ``aliases`` name tied parameters; ``notes``
    are for the report.
    """

    graph: Graph
    leaves: tuple[str, ...]
    result_tree: pytree.TreeSpec
    result_leaves: tuple[Any, ...]
    aliases: Mapping[str, str]
    notes: tuple[str, ...] = ()


class _Results:
    """How the model's results are arranged: known once it was traced."""

    tree: pytree.TreeSpec
    leaves: tuple[Any, ...]


class _Program(nn.Module):
    """The model and its loss as one function of tensor leaves."""

    def __init__(
        self,
        model: nn.Module,
        tree: pytree.TreeSpec,
        leaves: Sequence[Any],
        loss: Callable[..., torch.Tensor] | None,
        targets: int,
        results: _Results,
    ) -> None:
        super().__init__()
        self.model = model
        self._tree, self._leaves, self._loss, self._targets = tree, list(leaves), loss, targets
        self.results = results

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        given = iter(tensors)
        leaves = [next(given) if isinstance(leaf, torch.Tensor) else leaf for leaf in self._leaves]
        args, kwargs, targets = pytree.tree_unflatten(leaves, self._tree)
        out = self.model(*args, **kwargs)
        flat, tree = pytree.tree_flatten(out)
        self.results.tree = tree
        self.results.leaves = tuple("tensor" if isinstance(leaf, torch.Tensor) else leaf for leaf in flat)
        outs = [leaf.detach() for leaf in flat if isinstance(leaf, torch.Tensor)]
        if self._loss is None:
            return tuple(outs)
        loss = self._loss(out, *targets)
        if not isinstance(loss, torch.Tensor) or loss.dim() != 0:
            raise Error(
                "the loss is not a scalar tensor",
                where="Hints(loss=...)",
                expected="a tensor of shape ()",
                got=f"{tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__,
                remedy="reduce it, for example by .mean()",
            )
        return (loss, *outs)


def leaf_names(args: tuple[Any, ...], kwargs: Mapping[str, Any], targets: tuple[Any, ...]) -> list[tuple[str, Any]]:
    """Names such as ``args.0``, ``kwargs.mask``, ``targets.0``, ``args.0.key``, with the leaves they name."""
    found = []
    for root, tree in (("args", args), ("kwargs", dict(kwargs)), ("targets", targets)):
        for path, leaf in pytree.tree_flatten_with_path(tree)[0]:
            keys = [str(getattr(k, "idx", getattr(k, "key", getattr(k, "name", k)))) for k in path]
            found.append((".".join([root, *keys]), leaf))
    return found


def capture(
    model: nn.Module,
    mesh: Mesh,
    *,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    loss: Callable[..., torch.Tensor] | None = None,
    targets: tuple[Any, ...] = (),
    fold: bool = True,
) -> Captured:
    """Capture ``model`` (and its loss and backward, if ``loss`` is given) as one graph of global shapes.

    Args:
        fold: leave out equal blocks (see :mod:`.repeats`), as the graph's ``repeats`` say.

    Raises:
        Error: the model cannot be captured (data-dependent shapes, a loss that is not a scalar, ...).
    """
    kwargs = dict(kwargs or {})
    named = leaf_names(args, kwargs, targets)
    leaves, tree = pytree.tree_flatten((args, kwargs, targets))
    names = [name for name, leaf in named if isinstance(leaf, torch.Tensor)]
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    if not tensors:
        raise Error(
            "there is no example input",
            where="Hints(args=..., kwargs=...)",
            expected="the global batch as tensors (fake ones will do)",
            got=f"args={args!r}, kwargs={kwargs!r}",
        )
    with ExitStack() as stack:
        traced, tensors = _fake_weights(model, tensors, stack)
        params = dict(traced.named_parameters(remove_duplicate=False))
        buffers = dict(traced.named_buffers(remove_duplicate=False))
        aliases = _aliases({**params, **buffers})
        results = _Results()

        def program(model: nn.Module) -> _Program:
            return _Program(model, tree, leaves, loss, len(targets), results)

        short = Shortened(traced)
        if fold:
            short = find_repeats(traced, tensors, lambda model, given: program(model)(*given), aliases)
        wanted = Names(tuple(names), aliases, _loss_source(loss))
        graph, note = _trace(program(short.model), tuple(tensors), mesh, wanted), short.note
        graph.repeats = short.repeats
        try:
            check_regular(graph)
        except Irregular as error:
            graph = _trace(program(traced), tuple(tensors), mesh, wanted)
            note = f"{TRACED_WHOLE} ({error.what})"
    notes = (note,) if note else ()
    return Captured(graph, tuple(names), results.tree, results.leaves, aliases, notes)


def _loss_source(loss: Callable[..., Any] | None) -> Where | None:
    """Where the user wrote the loss."""
    if loss is None:
        return None
    code = getattr(loss, "__code__", None) or getattr(getattr(type(loss), "forward", None), "__code__", None)
    if code is None:
        return Where("loss")
    return Where(
        "loss", code.co_filename, code.co_firstlineno, linecache.getline(code.co_filename, code.co_firstlineno).strip()
    )


def _aliases(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """For every name the first name of the same tensor (itself, mostly)."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(tensor), name) for name, tensor in tensors.items()}


def _fake_weights(
    model: nn.Module, tensors: list[torch.Tensor], stack: ExitStack
) -> tuple[nn.Module, list[torch.Tensor]]:
    """A model on ``meta`` gets fake CPU weights: on ``meta`` some ops have no autograd kernel."""
    everything = [*model.parameters(), *model.buffers(), *tensors]
    fake = next((t.fake_mode for t in everything if isinstance(t, FakeTensor)), None)
    if fake is None and not any(t.is_meta for t in everything):
        return model, tensors
    mode = fake or FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        memo = {id(t): _on_cpu(t) for t in (*model.parameters(), *model.buffers())}
        tensors = [_on_cpu(t) for t in tensors]
    model = copy.deepcopy(model, memo)
    stack.enter_context(mode)
    return model, tensors


def _on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """A fake CPU tensor in place of one on ``meta``; any other as it is."""
    if not tensor.is_meta or isinstance(tensor, FakeTensor):
        return tensor
    made = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    return nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made


def _trace(program: _Program, tensors: tuple[torch.Tensor, ...], mesh: Mesh, names: Names) -> Graph:
    """The graph of a program's forward and backward."""
    from torch._decomp import get_decompositions

    decompositions: dict[Any, Callable[..., Any]] = get_decompositions(DECOMPOSED)
    try:
        with ExitStack() as stack, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            exported = torch.export.export(program, tensors, strict=False).module()
            _reject_unknown_shapes(exported)
            joint = aot_export_joint_with_descriptors(
                stack, exported, tensors, decompositions=decompositions, _record_nn_module_stack=True
            )
            return convert(joint.graph_module, mesh, names)
    except Error:
        raise
    except Exception as error:
        raise _explain(error) from error


def _reject_unknown_shapes(exported: torch.fx.GraphModule) -> None:
    """A value whose shape is only known when the program runs (``nonzero``) is refused where it is made."""
    for node in exported.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and any(not isinstance(size, int) for size in value.shape):
            raise _data_dependent(
                str(source_of(node)) + f"  {source_of(node).code}", f"{node.target} of shape {tuple(value.shape)}"
            )


def _data_dependent(where: str | None, got: str) -> Error:
    return Error(
        "the model's shapes or control flow depend on the data",
        where=where,
        expected="shapes that follow from the shapes of the inputs",
        got=got,
        remedy="use a mask and torch.where instead of nonzero(), boolean indexing, .item() or `if tensor`",
    )


DATA_DEPENDENT = ("GuardOnDataDependent", "data-dependent", "Could not guard", "_local_scalar_dense", "nonzero", "u0")


def _explain(error: Exception) -> Error:
    """What the user did that torch.export does not take, from its own words."""
    text = f"{type(error).__name__}: {error}"
    where = _user_frame(error)
    if any(word in text for word in DATA_DEPENDENT):
        return _data_dependent(where, text.splitlines()[0][:300])
    return Error(
        "the model cannot be captured by torch.export",
        where=where,
        expected="an nn.Module of tensor operations",
        got=text[:600],
        remedy="try torch.export.export(model, args, strict=False) on its own, and mend what it names",
    )


def _user_frame(error: Exception) -> str | None:
    """The innermost line of code outside of torch that the error passed through."""
    found, trace = None, error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if "/torch/" not in code.co_filename and not code.co_filename.startswith("<") and code.co_filename != __file__:
            found = f"{code.co_filename}:{trace.tb_lineno} in {code.co_name}"
        trace = trace.tb_next
    return found

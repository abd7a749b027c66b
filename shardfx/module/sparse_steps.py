"""Sparse gradients for a user's own optimizer: of the rows of a table that lookups named since the last zero_grad().

    loss = pm(x, y); loss.backward()      table.grad is a dense shard; the ids come beside it
    optimizer.step()                      SparseAdam steps the rows of these ids: its gradient is a sparse tensor

The gradient stays dense, so that clipping, scaling and adding work as ever; a step of ``torch.optim.SparseAdam`` takes
the rows from it that lookups named, which may have a gradient of zero.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer, SparseAdam
from torch.utils.weak import WeakIdKeyDictionary

from shardfx.ir.errors import Error
from shardfx.ir.graph import InputKind, OutputKind
from shardfx.ir.shards import local_shard
from shardfx.ir.spec import Spec
from shardfx.runtime.distributed.dtensor_shard import DTensorShard
from shardfx.runtime.step import ProgramRunner, Results
from shardfx.runtime.store import spec_of


@dataclass
class TouchedRows:
    """The rows of a parameter's shard that lookups named (bool) since its gradient was cleared.

    ``stepped``: an optimizer has stepped them, so that a gradient of zeros is one that was cleared in place.
    """

    rows: Tensor
    stepped: bool = False


_touched: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""The touched rows of each parameter."""


def touched_rows(step: ProgramRunner, results: Results) -> dict[Tensor, Tensor]:
    """The rows that a run looked up in each table with a sparse gradient, as a mask of the parameter's shard here."""
    found, store, graph = dict[Tensor, Tensor](), step.store, step.graph
    for inp in graph.of_kind(InputKind.PARAMETER):
        (ids,) = results.get((OutputKind.ROWS, inp.name), [None])
        if ids is not None and inp.name in store.parameters:
            rows = ids.new_zeros(inp.value.shape[0] + 1, dtype=torch.bool)
            rows[ids.reshape(-1)] = True  # what names no row is -1, the last one
            own = Spec.replicated(2) if store.rank is None else spec_of(inp)
            found[store.parameters[inp.name]] = local_shard(rows[:-1], Spec(own.dims[:1]), graph.mesh, store.rank or 0)
    return found


def touch(rows: dict[Tensor, Tensor]) -> None:
    """Note rows whose gradients are about to be added to those of their parameters."""
    for parameter, mask in rows.items():
        known, grad = _touched.get(parameter), parameter.grad
        if known is not None and known.stepped and grad is not None and not DTensorShard.unwrap(grad).any():
            known = None  # zero_grad(set_to_none=False)
        _touched[parameter] = TouchedRows(mask if known is None or grad is None else known.rows | mask)


def takes_rows(optimizer: Optimizer) -> bool:
    """Whether an optimizer takes sparse gradients alone."""
    return isinstance(optimizer, SparseAdam)


def reject_closure(closure: object) -> None:
    """Refuse a closure: gradients must be there before a step takes rows from them.

    Raises:
        Error: there is one.
    """
    if closure is not None:
        raise Error(
            "SparseAdam steps rows of gradients that are there before the step",
            where="SparseAdam.step(closure)",
            expected="loss.backward(), then step()",
            got="a closure",
            remedy="call the closure yourself, before step()",
        )


def sparse_gradient_of(parameter: Tensor, grad: Tensor, name: str) -> Tensor:
    """The local gradient of a parameter as a sparse tensor of the rows that lookups named.

    Raises:
        Error: its gradient is dense in eager PyTorch, too.
    """
    known: TouchedRows | None = _touched.get(parameter)
    if known is None:
        raise Error(
            f"SparseAdam takes sparse gradients, and that of {name!r} is dense",
            where="SparseAdam.step()",
            expected="parameters of nn.Embedding(sparse=True) or nn.EmbeddingBag(sparse=True), used by lookups alone",
            got="a gradient of pm(...) of all rows",
            remedy="step this parameter by another optimizer; or have its module say sparse=True",
        )
    known.stepped = True
    ids = known.rows.nonzero().squeeze(1)
    return torch.sparse_coo_tensor(
        ids[None], grad.index_select(0, ids), grad.shape, is_coalesced=True, check_invariants=False
    )

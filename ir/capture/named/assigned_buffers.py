"""A buffer that a forward replaces is written into instead: programs have the buffers that the model had.

    self.low = torch.min(self.low, x.amin())    ->    low.copy_(torch.min(low, x.amin()))

Torch's export sees that for buffers of the outermost module alone, and forgets what becomes of the others.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from shardfx.ir.errors import Error


@contextmanager
def buffers_written_into(program: nn.Module) -> Iterator[None]:
    """Within, buffers may be replaced; behind, they are those that there were, and hold what the new ones do.

    Raises:
        Error: a new one has another shape or dtype, or a gradient; or there is none any more.
    """
    modules = [(path.removeprefix("model."), each, dict(each._buffers)) for path, each in program.named_modules()]
    left: list[tuple[str, Tensor, Tensor | None]] = []
    try:
        yield
    finally:
        for path, module, were in modules:  # what was None is looked at beside other attributes
            now = {name: module._buffers.get(name) for name in were}
            left += [(f"{path}.{n}", was, now[n]) for n, was in were.items() if was is not None and now[n] is not was]
            module._buffers.update({name: was for name, was in were.items() if was is not None})
    new = [(was, _checked(name, was, now)) for name, was, now in left]
    # Several may have changed places, and one may be a view of what it is written into.
    alone = len(new) == 1 and not new[0][1]._is_view()
    for was, given in [(was, now if alone else now.clone()) for was, now in new]:
        with torch.no_grad():
            was.copy_(given)


def _checked(name: str, was: Tensor, now: Tensor | None) -> Tensor:
    if now is not None and (now.shape, now.dtype) == (was.shape, was.dtype) and not now.requires_grad:
        return now
    wanted, got = (
        f"{str(each.dtype).removeprefix('torch.')} {tuple(each.shape)}" for each in (was, was if now is None else now)
    )
    raise Error(
        "the model puts something else in a buffer's place",
        where=name,
        expected=f"a tensor as it was, {wanted}, without a gradient",
        got="None, or no such buffer" if now is None else f"{got}, with a gradient" if now.requires_grad else got,
        remedy="detach() what becomes a buffer; register it in the shape that it takes; what only this call needs is "
        "no buffer",
    )

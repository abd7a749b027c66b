"""Which of the real ranks hold what is stored, where a graph has stages; and how the others get it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from shardfx.ir.graph import Graph, Input
from shardfx.ir.mesh import Mesh
from shardfx.runtime.distributed.groups import is_dry_run, make_groups, the_cpu_group
from shardfx.runtime.distributed.peer_failure import ending_together

T = TypeVar("T")
Tensor = torch.Tensor
c10d = torch.ops._c10d_functional


class StageHomes:
    """The inputs of a graph, and where along the axis of its stages they are held."""

    def __init__(self, graph: Graph, rank: int) -> None:
        self.graph, self.rank = graph, rank
        self.mesh, self.pipeline = graph.mesh, graph.pipeline
        self.coords = self.mesh.coords(rank)

    def is_here(self, given: Input) -> bool:
        """Whether this rank holds an input."""
        return self.graph.is_here(given.at, self.coords)

    def holders(self, given: Input) -> list[int]:
        """The ranks that hold an input."""
        mesh = self.mesh
        return [rank for rank in range(mesh.size) if self.graph.is_here(given.at, mesh.coords(rank))]

    @property
    def along(self) -> Mesh | None:
        """The mesh of the ranks that hold the same inputs: without the axis of stages; None if there is no other."""
        stages = "" if self.pipeline is None else self.pipeline.axis
        axes: dict[str, Any] = {axis.name: axis.size for axis in self.mesh.space if axis.name != stages}
        return Mesh(**axes) if axes else None

    def to_all(self, given: Input, mine: Tensor | None, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The whole tensor of an input, of which those that hold it have theirs. All ranks call it alike."""
        places = self.pipeline.places(given.at) if self.pipeline is not None else ()
        if self.pipeline is None or len(places) == self.mesh[self.pipeline.axis].size:
            assert mine is not None
            return mine
        sent = torch.empty(given.value.shape, dtype=dtype, device=device) if mine is None else mine.contiguous()
        axes = (self.pipeline.axis,)
        make_groups(self.mesh, [axes])
        with ending_together(f"sending {given.name!r} to the ranks of other stages"):
            group = self.mesh.group_name(self.rank, axes)
            made: Tensor = c10d.wait_tensor.default(c10d.broadcast.default(sent, places[0], group))
        return made

    def said(self, mine: Mapping[str, T]) -> Mapping[str, T]:
        """What ranks say of what they hold, by name, in the order of the inputs. All ranks call it alike."""
        if self.pipeline is None or is_dry_run():
            return mine
        every: list[Mapping[str, T]] = [{}] * self.mesh.size
        with ending_together("telling what the stages hold"):
            dist.all_gather_object(every, mine, group=the_cpu_group())
        found: dict[str, T] = {}
        for each in every:
            found = {**each, **found}
        return {given.name: found[given.name] for given in self.graph.inputs if given.name in found}

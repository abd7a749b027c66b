"""Damaged programs: what a verifier must notice.

What the compiler could get wrong stands here, one kind a line of :data:`MUTATIONS`: each finds the places where its
damage can be done to one rank's ``fx`` graph and does it at the k-th, on every rank or on one only.
"""

from __future__ import annotations

import operator
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

import shardfx as sx
from shardfx.ir.graph import OutputKind
from shardfx.ir.ops import memory_ops, pack
from shardfx.ir.ops.pools import transfer
from shardfx.ir.program.lower import identifier
from shardfx.ir.program.plain import plain
from shardfx.ir.program.rank_program import RankProgram
from tests.damage import (
    ALL_REDUCE,
    GATHER,
    SCATTER,
    WAIT,
    Damage,
    Places,
    Site,
    all_axes,
    argument,
    aten,
    becomes,
    bias_inside,
    biased,
    both_known,
    cast,
    double_collective,
    drawn_elsewhere,
    drop_collective,
    followed,
    interchangeable,
    lost_update,
    not_reduced,
    number,
    of,
    one_axis,
    other_axis,
    other_parameter,
    parameters_with_twin,
    roll,
    same_shape,
    shards,
    square,
    summed,
    swap_offsets,
    swap_outputs,
    swapped,
    take_elsewhere,
    target,
    tied,
    twins,
    waits,
    with_buffers,
)
from tests.damage_memory import (
    gathered_over_an_input,
    joined,
    joined_otherwise,
    memories_with_twin,
    over_another_state,
    read_before_the_wait,
    read_from_slot,
    shared_memory,
    slots_of_gradients,
    stepped,
    waits_of_all,
)
from tests.damage_pools import (
    another_fetched,
    by_ids_that_travel,
    fetched_with_twin,
    not_fetched,
    not_waited_for,
    of_other_rows,
    of_rows_too_early,
    puts_with_twin,
    read_behind_its_new_content,
    read_where_it_lies,
    swapped_places,
    used_arrivals,
)
from tests.damage_shards import (
    first_slice,
    gradients,
    one_for_two,
    other_order_of_axes,
    parameter_for_its_gradient,
    plain_for_compound,
    recomputed,
    single,
    slices,
    slices_of_compounds,
    slices_of_slices,
    stale,
    stepped_rows,
    unpacked,
    widened,
)
from tests.damage_sums import (
    norm_of_the_whole,
    norms_of_slices,
    of_fewer_axes,
    of_several_axes,
    one_counted_twice,
    sums_of_squares,
    with_an_axis,
    without_an_axis,
)


@dataclass(frozen=True)
class Mutation:
    """``damage`` done at one of the ``places``: on every rank, or (``alone``) on the last one only."""

    name: str
    places: Places
    damage: Damage
    alone: bool = False


# Not among them: a sum for a max. A maximum stands in a softmax only, where any other shift gives the same result.
MUTATIONS = (
    Mutation("all-reduce dropped", waits(ALL_REDUCE), drop_collective),
    Mutation("all-reduce dropped on one rank", waits(ALL_REDUCE), drop_collective, True),
    Mutation("all-reduce doubled", summed, double_collective),
    Mutation("all-reduce over the other axis", one_axis, other_axis),
    Mutation("all-reduce over all axes", one_axis, all_axes),
    Mutation("all-reduce without an axis", of_several_axes, without_an_axis),
    Mutation("all-reduce over an axis more", of_fewer_axes, with_an_axis),
    Mutation("norm of the whole on every rank", norms_of_slices, norm_of_the_whole),
    Mutation("one norm counted twice", sums_of_squares, one_counted_twice),
    Mutation("max for sum", of(ALL_REDUCE, when=lambda n: n.args[1] == "sum"), argument(1, lambda _: "max")),
    Mutation("avg for sum", of(ALL_REDUCE, SCATTER, when=lambda n: n.args[1] == "sum"), argument(1, lambda _: "avg")),
    Mutation(
        "other kind on one rank", of(ALL_REDUCE), argument(1, lambda kind: "max" if kind == "sum" else "sum"), True
    ),
    Mutation(
        "gather joined along another dim",
        of(pack.unpack_gathered, when=lambda n: 1 not in n.args[4]),  # type: ignore[operator]
        argument(3, lambda dim: (dim + 1) % 2),
    ),
    Mutation("scatter sharded along another dim", of(pack.pack_scattered), argument(2, lambda dim: (dim + 1) % 2)),
    Mutation("gathered shards in another order", waits(GATHER), roll),
    Mutation("scattered rows in another order", waits(SCATTER), roll),
    Mutation("factor 1/N", waits(ALL_REDUCE), followed(aten.mul.Tensor, 0.5)),
    Mutation("factor 1/N on one rank", waits(ALL_REDUCE, SCATTER), followed(aten.mul.Tensor, 0.5), True),
    Mutation("bias on every rank", biased, bias_inside),
    Mutation("bucket's shard not reduced", shards, not_reduced),
    Mutation("bucket offsets swapped", twins, swap_offsets),
    Mutation("slice at another offset", slices, take_elsewhere, True),
    Mutation("the first slice on every rank", slices, first_slice),
    Mutation("slices of axes in another order", slices_of_slices, other_order_of_axes),
    Mutation("a state of another shard stepped", stepped_rows, take_elsewhere, True),
    Mutation("a stale recompute", recomputed, stale),
    Mutation("plain slices for compound ones", slices_of_compounds, plain_for_compound),
    Mutation("another parameter read", parameters_with_twin, other_parameter),
    Mutation("another parameter read on one rank", parameters_with_twin, other_parameter, True),
    Mutation("dropout with another p", of(torch.ops.shardfx.dropout.default), argument(1, lambda p: p / 2)),
    Mutation("dropout drawn for another box", of(torch.ops.shardfx.dropout.default), drawn_elsewhere, True),
    Mutation("eps changed", of(aten.native_layer_norm.default), argument(4, lambda eps: eps * 100)),
    Mutation("relu's gradient at another threshold", of(aten.threshold_backward.default), argument(2, lambda _: 0.5)),
    Mutation(
        "a number changed",
        of(aten.mul.Tensor, aten.div.Tensor, aten.add.Tensor, when=number(1)),
        argument(1, lambda x: x * 2),
    ),
    Mutation("exponent changed", of(aten.pow.Tensor_Scalar), argument(1, lambda x: x + 1)),
    Mutation("weight not transposed", square, becomes(0)),
    Mutation("term of an add missing", same_shape, becomes(0)),
    Mutation("other term of an add missing", same_shape, becomes(1)),
    Mutation("gradient of a tied weight counted once", tied, becomes(0)),
    Mutation("operands of a sub swapped", of(aten.sub.Tensor, when=both_known), swapped(0, 1)),
    Mutation("operands of a div swapped", of(aten.div.Tensor, when=both_known), swapped(0, 1)),
    Mutation("mask's upper bound", of(aten.ge.Scalar), argument(1, lambda n: n // 2), True),
    Mutation("mask's lower bound", of(aten.lt.Scalar), argument(1, lambda n: n + 8)),
    Mutation("mask forgotten", of(aten.masked_fill.Scalar), becomes(0)),
    Mutation(
        "index not shifted",
        of(aten.clamp.default, when=lambda n: n.args[0].target is aten.sub.Tensor),
        lambda s, n: n.update_arg(0, n.args[0].args[0]),
        True,
    ),  # type: ignore
    Mutation("outputs swapped", interchangeable, swap_outputs),
    Mutation("one output for two", interchangeable, one_for_two),
    Mutation("a parameter for its gradient", gradients, parameter_for_its_gradient),
    Mutation("buffer or state not updated", with_buffers, lost_update),
    Mutation("cast down and up", of(aten.mm.default, aten.addmm.default, aten.convolution.default), cast),
    Mutation(
        "another activation", of(aten.relu.default, aten.gelu.default, aten.silu.default), target(aten.abs.default)
    ),
    Mutation("sin for cos", of(aten.cos.default, aten.exp.default, aten.rsqrt.default), target(aten.sin.default)),
    Mutation("sign lost", of(aten.neg.default), becomes(0)),
    Mutation(
        "attention not causal",
        of(aten._scaled_dot_product_flash_attention_for_cpu.default),
        argument(4, lambda causal: not causal),
    ),
    Mutation(
        "shards of a split swapped",
        of(operator.getitem, when=lambda n: n.args[0].target is aten.split_with_sizes.default),
        argument(1, lambda i: (i + 1) % 3),
    ),  # type: ignore
    Mutation("one add for another", of(aten.add.Tensor, when=both_known), target(aten.sub.Tensor)),
    Mutation(
        "sum over another dim",
        of(aten.sum.dim_IntList, when=lambda n: n.args[1] == [0]),
        lambda s, n: n.update_arg(1, [-1]),
    ),
    Mutation(
        "stride of a range",
        of(aten.arange.default, aten.arange.start_step),
        lambda s, n: s.after(n, aten.flip.default, n, [0]),
    ),
    Mutation("a constant changed", of(aten.full.default), argument(1, lambda x: x + 1)),
    Mutation(
        "threshold's activation is another",
        of(aten.threshold_backward.default, when=lambda n: n.args[1] is not n.args[0]),
        lambda s, n: n.update_arg(1, n.args[0]),
    ),
)


IN_PLACE = (
    Mutation("a slot written twice", of(memory_ops.part, when=lambda n: n.args[2] > 0), argument(2, lambda _: 0)),
    Mutation("a read before the wait", waits_of_all, read_before_the_wait),
    Mutation("a slot of the pool for two", memories_with_twin, shared_memory),
    Mutation("a gradient read from its slot", slots_of_gradients, read_from_slot),
    Mutation("gathered over an input", of(memory_ops.all_gather_into), gathered_over_an_input),
    Mutation("joined in another order", of(memory_ops.join, when=lambda n: len(n.args[1]) > 1), joined_otherwise),
    Mutation("stepped over another state", stepped, over_another_state),
    Mutation("not written where it is joined", of(memory_ops.write, when=joined), becomes(1)),
)
"""Damage to destinations."""

POOLS = (
    Mutation("read where it was offloaded", used_arrivals, read_where_it_lies),
    Mutation("read before its copy is there", used_arrivals, not_waited_for),
    Mutation("another value fetched", fetched_with_twin, another_fetched),
    Mutation("another value fetched on one rank", fetched_with_twin, another_fetched, True),
    Mutation("a state put where another one lies", puts_with_twin, swapped_places),
    Mutation("a state fetched behind its new content", of(transfer.put), read_behind_its_new_content),
    Mutation("a state put back as it was", of(transfer.put), not_fetched),
    Mutation("returned beside where it belongs", of(transfer.put), becomes(1)),
    Mutation("rows of other samples", by_ids_that_travel, of_other_rows),
    Mutation("rows of other samples on one rank", by_ids_that_travel, of_other_rows, True),
    Mutation("rows looked up before their ids are there", by_ids_that_travel, of_rows_too_early),
)
"""Damage to what is offloaded and fetched."""
AS_THEY_RUN = (*IN_PLACE, *POOLS)
"""What the programs as they run could get wrong."""

HARMLESS = (
    Mutation("a copy", single, followed(aten.clone.default)),
    Mutation("an alias", single, followed(aten.alias.default)),
    Mutation("an alias of what lies in a buffer", unpacked, followed(aten.alias.default)),
    Mutation("what lies in a buffer, with a dim more and without it", unpacked, widened),
    Mutation("a detached value", single, followed(aten.detach.default)),
    Mutation("a copy on one rank", single, followed(aten.clone.default), True),
    Mutation("an add the other way round", of(aten.add.Tensor, when=both_known), swapped(0, 1)),
    Mutation("waited for twice", single, followed(WAIT)),
)
"""What changes no value."""


@dataclass(frozen=True)
class Programs:
    """The programs of a plan, to be damaged: in the plain form that most kinds of damage speak of, or as they run."""

    programs: Mapping[int, RankProgram]
    shapes: Mapping[int, Mapping[str, tuple[int, ...]]]
    buffers: Sequence[tuple[int, str]]
    gradients: Sequence[tuple[int, str]]

    @staticmethod
    def of(pm: sx.ParallelModule, as_they_run: bool = False) -> Programs:
        given = {identifier(g.name): g.value for g in pm.planned.inputs}
        shapes = {
            rank: {n: v.spec.local_shape(v.shape, pm.mesh, pm.mesh.coords(rank)) for n, v in given.items() if v.spec}
            for rank in range(pm.mesh.size)
        }
        programs = {rank: pm.rank_program(rank) for rank in range(pm.mesh.size)}
        if not as_they_run:
            programs = {rank: plain(program) for rank, program in programs.items()}
        outputs = list(enumerate(programs[0].outputs))
        buffers = [(i, o.name) for i, o in outputs if o.kind.is_kept]
        gradients = [(i, identifier(o.name)) for i, o in outputs if o.kind is OutputKind.GRADIENT]
        return Programs(programs, shapes, buffers, gradients)

    def site(self, rank: int, program: RankProgram) -> Site:
        return Site(program.graph, rank, program.mesh, self.shapes[rank], self.buffers, self.gradients)

    def damaged(
        self, mutation: Mutation, count: int, seed: int = 0, on: int | None = None
    ) -> Iterator[tuple[str, dict[int, RankProgram]]]:
        """Up to ``count`` damaged sets of programs, each with the node at which it was damaged; ``on`` a rank alone."""
        last = max(self.programs) if on is None else on
        ranks = [last] if mutation.alone or on is not None else [*self.programs]
        places = max(len(mutation.places(self.site(rank, self.programs[rank]))) for rank in ranks)
        chosen = random.Random(f"{seed} {mutation.name}").sample(range(places), min(count, places))
        for k in sorted(chosen):
            made: dict[int, RankProgram] = {}
            name = ""
            for rank in ranks:
                program = self.programs[rank].copy()
                site = self.site(rank, program)
                found = mutation.places(site)
                if k >= len(found):
                    continue
                name, before = found[k].name, str(site.graph)
                mutation.damage(site, found[k])
                if str(site.graph) != before:
                    site.graph.lint()
                    made[rank] = program
            if made:
                yield name, made

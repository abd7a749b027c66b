"""Rank passes, which optimize one rank's program, in the order of :data:`ORDER`."""

from .arena import Arena
from .buckets import AddInto, Buckets
from .check_room import CheckRoom
from .compiler_passes import AttentionLayout, MaterializeScalars, WriteBack
from .destinations import GatherInto, InPlace
from .interleave import Interleave
from .overwrite import Overwrite, OwnOutputs
from .rank_pass import RankContext, RankPass, run_rank_passes
from .recompute_halo import RematerializeUnpacks
from .rematerialize import Rematerialize
from .segments import Segments
from .waits import Waits

ORDER: tuple[type[RankPass], ...] = (
    *(AttentionLayout, Rematerialize, Waits, RematerializeUnpacks, Buckets, AddInto, GatherInto, InPlace, Overwrite),
    *(MaterializeScalars, WriteBack, OwnOutputs, Segments, Interleave, CheckRoom, Arena),
)
BUILT_IN: dict[str, type[RankPass]] = {each.name: each for each in ORDER}


def built_in(device: str, compiled: bool = False) -> tuple[RankPass, ...]:
    """The rank passes for a kind of device. ``compiled``: for ``torch.compile``, which plans memory itself."""
    if compiled:
        return (AttentionLayout(), Rematerialize(), Waits(), MaterializeScalars(), WriteBack(), OwnOutputs())
    kept = (Waits(), RematerializeUnpacks(), Buckets(), AddInto(), GatherInto(), InPlace(), Overwrite())
    return (*kept, OwnOutputs(), Segments(), Interleave(), CheckRoom())


__all__ = ["BUILT_IN", "AddInto", "Arena", "AttentionLayout", "Buckets", "CheckRoom", "GatherInto", "InPlace"]
__all__ += ["Interleave", "MaterializeScalars", "Overwrite", "OwnOutputs", "RankContext", "RankPass", "Rematerialize"]
__all__ += ["RematerializeUnpacks", "Segments", "Waits", "WriteBack", "built_in", "run_rank_passes"]

"""From one rank's program to a better one: one file a pass. They run in the order of :func:`default_rank_passes`."""

from .add_into import AddInto
from .arena import Arena
from .attention_layout import AttentionLayout
from .buckets import Buckets
from .gather_into import GatherInto
from .in_place import InPlace
from .interleave import Interleave
from .materialize_scalars import MaterializeScalars
from .overwrite import Overwrite
from .own_outputs import OwnOutputs
from .rank_pass import RankContext, RankPass, run_rank_passes
from .rematerialize import Rematerialize
from .segments import Segments
from .unpack_again import RematerializeUnpacks
from .waits import Waits
from .write_back import WriteBack

ORDER: tuple[type[RankPass], ...] = (
    AttentionLayout,
    Rematerialize,
    Waits,
    RematerializeUnpacks,
    Buckets,
    AddInto,
    GatherInto,
    InPlace,
    Overwrite,
    MaterializeScalars,
    WriteBack,
    OwnOutputs,
    Segments,
    Interleave,
    Arena,
)
BUILT_IN: dict[str, type[RankPass]] = {each.name: each for each in ORDER}


def built_in(device: str, compiled: bool = False) -> tuple[RankPass, ...]:
    """The rank passes for a kind of device. ``compiled``: torch plans memory."""
    if compiled:
        return (AttentionLayout(), Rematerialize(), Waits(), MaterializeScalars(), WriteBack(), OwnOutputs())
    kept = (Waits(), RematerializeUnpacks(), Buckets(), AddInto(), GatherInto(), InPlace(), Overwrite())
    return (*kept, OwnOutputs(), Segments(), Interleave())


__all__ = [
    "BUILT_IN",
    "AddInto",
    "Arena",
    "AttentionLayout",
    "Buckets",
    "GatherInto",
    "InPlace",
    "Interleave",
    "MaterializeScalars",
    "Overwrite",
    "OwnOutputs",
    "RankContext",
    "RankPass",
    "Rematerialize",
    "RematerializeUnpacks",
    "Segments",
    "Waits",
    "WriteBack",
    "built_in",
    "run_rank_passes",
]

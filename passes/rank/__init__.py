"""From one rank's program to a better one: one file a pass. They run in the order of :func:`default_rank_passes`."""

from .add_into import AddInto
from .arena import Arena
from .buckets import Buckets
from .gather_into import GatherInto
from .in_place import InPlace
from .interleave import Interleave
from .overwrite import Overwrite
from .own_outputs import OwnOutputs
from .rank_pass import RankContext, RankPass, run_rank_passes
from .segments import Segments
from .unpack_again import UnpackAgain
from .waits import Waits

ORDER: tuple[type[RankPass], ...] = (
    Waits,
    UnpackAgain,
    Buckets,
    AddInto,
    GatherInto,
    InPlace,
    Overwrite,
    OwnOutputs,
    Segments,
    Interleave,
    Arena,
)
BUILT_IN: dict[str, type[RankPass]] = {each.name: each for each in ORDER}


def built_in(device: str, compiled: bool = False) -> tuple[RankPass, ...]:
    """The rank passes for a kind of device. ``compiled``: nothing in place, torch plans memory."""
    if compiled:
        return (Waits(), OwnOutputs())
    kept = (Waits(), UnpackAgain(), Buckets(), AddInto(), GatherInto(), InPlace(), Overwrite())
    return (*kept, OwnOutputs(), Segments(), Interleave())


__all__ = [
    "BUILT_IN",
    "AddInto",
    "Arena",
    "Buckets",
    "GatherInto",
    "InPlace",
    "Interleave",
    "Overwrite",
    "OwnOutputs",
    "RankContext",
    "RankPass",
    "Segments",
    "UnpackAgain",
    "Waits",
    "built_in",
    "run_rank_passes",
]

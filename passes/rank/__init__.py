"""From one rank's program to a better one: one file a pass. They run in the order of :func:`default_rank_passes`."""

from .buckets import Buckets
from .gather_into import GatherInto
from .in_place import InPlace
from .own_outputs import OwnOutputs
from .rank_pass import RankContext, RankPass, run_rank_passes
from .waits import Waits

BUILT_IN: dict[str, type[RankPass]] = {each.name: each for each in (Waits, Buckets, GatherInto, InPlace, OwnOutputs)}


def built_in(device: str, compiled: bool = False) -> tuple[RankPass, ...]:
    """The rank passes for a kind of device. ``compiled``: nothing in place, torch plans memory."""
    if compiled:
        return (Waits(), OwnOutputs())
    gathers = (GatherInto(),) if device == "cpu" else ()
    return (Waits(), Buckets(), *gathers, InPlace(), OwnOutputs())


__all__ = [
    "BUILT_IN",
    "Buckets",
    "GatherInto",
    "InPlace",
    "OwnOutputs",
    "RankContext",
    "RankPass",
    "Waits",
    "built_in",
    "run_rank_passes",
]

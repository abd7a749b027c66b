"""The runtime: engines, stores and verification; re-exports the names that a writer of engines or rank passes needs
(docs/writing_passes.md)."""

from .engine import Engine, Probe, RankProbe
from .store import Store
from .verify.verdict import Verdict
from .virtual.virtual_engine import VirtualEngine

__all__ = [
    "Engine",
    "Probe",
    "RankProbe",
    "Store",
    "Verdict",
    "VirtualEngine",
]

"""Training scripts as people have them, plain and ported: what changes between the two is all that porting asks.

Each module has ``plain(steps, folder)``, for one device, and ``ported(mesh, steps, folder)``. Both go on where the last
checkpoint in the folder is, if there is one, leave one, and give the losses of the steps that they made. ``MESHES`` are
two plans, one to begin under and one to go on under.
"""

from __future__ import annotations

from collections.abc import Mapping

import shardfx as sx

STEPS = 4
"""Calls in a run."""
SCRIPTS = ["accelerate_loop", "trainer"]


def on(mesh: sx.Mesh, specs: Mapping[str, str]) -> dict[str, str]:
    """The specs that a mesh has the axes for."""
    names = {axis.name for axis in mesh.axes}
    return {name: spec for name, spec in specs.items() if set(spec.replace(",", " ").split()) <= names | {"-"}}

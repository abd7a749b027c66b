"""State dicts of pieces say which pieces they are, and are loaded where these belong.

``pm.state_dict()`` holds a rank's pieces under the model's names. Another rank's pieces, or those of another plan, have
the same names and mostly the same shapes; loading them would give other weights, and no key would be missing.

Each piece says it as well, so that one which was put under another name by hand is not taken for what belongs there:
two blocks may change their weights, which are sharded alike, and a weight's two pieces may not. A ``DTensor`` says it
too: what it says of itself is how it is sharded, and not whose piece it is after it was saved and loaded, nor in which
order a compound dim was sharded. (A tensor that was computed says nothing; a ``DTensor`` that was is brought to the
placement of the one that it is copied to.)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from shardfx.ir.errors import Error

from .like import NUMBER

STAMP, PIECE = "shardfx", "shardfx_piece"


def stamp_state_dicts(root: nn.Module) -> None:
    """Have the state dicts of a parallel module say what they hold, and look at those that come in."""
    root.register_state_dict_post_hook(put)
    root.register_load_state_dict_pre_hook(check)


def put(module: Any, state_dict: Any, prefix: str, local_metadata: dict[str, Any]) -> None:
    """Say in a state dict, and on what is in it, which pieces it holds, in words that may be saved."""
    held = module._store.held()
    local_metadata[STAMP] = {name: list(each) for name, each in held.items()}
    live = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
    for key, tensor in list(state_dict.items()):
        place = _place(key.removeprefix(prefix), held)
        if place is None or not isinstance(tensor, torch.Tensor) or id(tensor) in live:
            continue
        shown = module._store.shown(key.removeprefix(prefix))
        if shown is not None:
            tensor = state_dict[key] = shown.wrap(shown.plain(tensor))  # which may be copied
        setattr(tensor, PIECE, list(place))


def check(module: Any, state_dict: Any, prefix: str, local_metadata: dict[str, Any], *rest: Any) -> None:
    """Refuse a state dict that says other pieces than are held here.

    Raises:
        Error: naming the first parameter or buffer that is another piece, is sharded in another way, or is whole where
            there are pieces; new tensors are to be put in the place of those that there are.
    """
    mine = dict((*module.named_parameters(), *module.named_buffers()))
    given = {name: state_dict[prefix + name] for name in module._store.held() if prefix + name in state_dict}
    unsaid = given if STAMP not in local_metadata else {}
    whole = next((name for name, new in unsaid.items() if _is_piece(mine.get(name)) and not _is_piece(new)), None)
    if whole is not None or local_metadata.get("assign_to_params_buffers"):
        raise Error(
            "new tensors cannot take the place of the stored ones"
            if whole is None
            else f"{whole!r} of this state dict is whole, and in pieces here",
            where="pm.load_state_dict(...)",
            expected="pieces, as pm.state_dict() gives them",
            got="assign=True" if whole is None else "a state dict of the model itself",
            remedy="leave assign=True out" if whole is None else "pm.load_full_state_dict(...)",
        )
    module._store.loaded(given)
    held, theirs = module._store.held(), local_metadata.get(STAMP, {})
    said = [(name, own, tuple(theirs.get(name, own)), "the piece of another rank") for name, own in held.items()]
    for key, tensor in state_dict.items():
        place = _place(key.removeprefix(prefix), held) if key.startswith(prefix) else None
        if place is not None:
            said.append((key, place, tuple(getattr(tensor, PIECE, place)), "another piece, put under this name"))
    for name, (spec, piece), (got_spec, got), otherwise in said:
        if (got_spec, got) == (spec, piece):
            continue
        sharding, other = got_spec != spec, "all pieces" if got < 0 else f"piece {got}"
        raise Error(
            f"{name!r} of this state dict is {'stored otherwise' if sharding else otherwise}",
            where="pm.load_state_dict(...)",
            expected=spec if sharding else f"piece {piece} of it",
            got=got_spec if sharding else other,
            remedy="save pm.full_state_dict(), and pm.load_full_state_dict(...) that; or save the pieces of all "
            "ranks by torch.distributed.checkpoint",
        )


def _place(key: str, held: Mapping[str, tuple[str, int]]) -> tuple[str, int] | None:
    """How the parameter or buffer of a key is placed, and which of its pieces the key is; None: it is neither."""
    path = key.split(".")
    name = ".".join(part for part in path if not part.startswith(NUMBER))
    if name not in held:
        return None
    spec, piece = held[name]
    return spec, next((int(part.removeprefix(NUMBER)) for part in path if part.startswith(NUMBER)), piece)


def _is_piece(held: object) -> bool:
    """Whether this is no whole tensor: one of a DTensor, or (None) of a parameter that has a name for each piece."""
    return held is None or hasattr(type(held), "to_local")

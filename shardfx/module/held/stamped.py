"""State dicts of pieces say which pieces they are, and are loaded where these belong.

``pm.state_dict()`` holds a rank's pieces under the model's names. Another rank's pieces, or those of another plan, have
the same names and mostly the same shapes; loading them would give other weights, and no key would be missing.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from shardfx.ir.errors import Error

STAMP = "shardfx"


def stamp_state_dicts(root: nn.Module) -> None:
    """Have the state dicts of a parallel module say what they hold, and look at those that come in."""
    root.register_state_dict_post_hook(put)
    root.register_load_state_dict_pre_hook(check)


def put(module: Any, state_dict: Any, prefix: str, local_metadata: dict[str, Any]) -> None:
    """Say in a state dict which pieces it holds, in words that may be saved."""
    local_metadata[STAMP] = {name: list(held) for name, held in module.store.held().items()}


def check(module: Any, state_dict: Any, prefix: str, local_metadata: dict[str, Any], *rest: Any) -> None:
    """Refuse a state dict that says other pieces than are held here.

    Raises:
        Error: naming the first parameter or buffer that is another piece, is cut in another way, or is whole where
            there are pieces; new tensors are to be put in the place of those that there are.
    """
    own = dict((*module.named_parameters(), *module.named_buffers()))
    given = {name: state_dict[prefix + name] for name in module.store.held() if prefix + name in state_dict}
    unsaid = given if STAMP not in local_metadata else {}
    whole = next((name for name, new in unsaid.items() if _is_piece(own.get(name)) and not _is_piece(new)), None)
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
    theirs = local_metadata.get(STAMP, {})
    for name, (spec, piece) in module.store.held().items():
        got_spec, got = theirs.get(name, (spec, piece))
        if (got_spec, got) == (spec, piece):
            continue
        cut, other = got_spec != spec, "all pieces" if got < 0 else f"piece {got}"
        raise Error(
            f"{name!r} of this state dict is {'stored otherwise' if cut else 'the piece of another rank'}",
            where="pm.load_state_dict(...)",
            expected=spec if cut else f"piece {piece}, of this rank",
            got=got_spec if cut else other,
            remedy="save pm.full_state_dict(), and pm.load_full_state_dict(...) that; or save the pieces of all "
            "ranks by torch.distributed.checkpoint",
        )


def _is_piece(held: object) -> bool:
    """Whether this is no whole tensor: one of a DTensor, or (None) of a parameter that has a name for each piece."""
    return held is None or hasattr(type(held), "to_local")

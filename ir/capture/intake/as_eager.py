"""Is what was traced what the model computes? Code may do something else while it is traced.

    if torch.compiler.is_compiling(): ...          torch.jit.is_tracing()          isinstance(x, FakeTensor)

So a model with content is run on its example as it is, beside what was traced, and their results are compared. Where
that run changes what modules hold beside parameters and buffers (``self.calls += 1``, ``self.hidden = h``), it is run
once more: what a model keeps from call to call no program keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from shardfx.ir.capture.named.code_names import Names
from shardfx.ir.errors import Error
from shardfx.ir.shards import wide

from .contents import STATE, Contents
from .given import copied
from .surroundings import Surroundings

MODEL = "model."
"""Where the model stands in a program of it and its loss."""
MOST = 2**24
"""Elements stored and given: of a larger model a run costs more than its capture, and its user is spared it, unless
it is traced with numbers, which is a run already."""


def check_as_eager(
    program: nn.Module, exported: nn.Module, given: tuple[Tensor, ...], guarded: bool, recast: bool = False
) -> str:
    """Compare the results of ``program`` (loss first, where there is one) with those of what was traced of it.

    Nothing is compared where weights or examples have no content, and where the model is random and differs: by the
    same seed both draw the same numbers where they draw them by the same calls. The result says so of this, and where
    the model does not run on its example (token ids that were never set, say); else it is empty. ``recast``: it is to
    compute in another dtype than its parameters'.

    Raises:
        Error: they differ: naming the result and the two numbers; or the model does not run in the dtype in which it is
            to compute.
    """
    everything = [*program.parameters(), *program.buffers(), *given]
    if any(isinstance(each, FakeTensor) or each.device.type != "cpu" for each in everything):
        return ""
    if not guarded and sum(each.numel() for each in everything) > MOST:
        return ""
    own = copied(program, {})
    around = Surroundings(own.get_submodule("model"), getattr(own, "loss", None))
    kept = [_attributes(own, around)]
    try:
        eager, random = _run(own, given, own.buffers())
        kept.append(_attributes(own, around))
        again = _run(own, given, own.buffers())[0] if kept[0] != kept[1] else eager
        kept.append(_attributes(own, around))
    except Exception as error:
        kind = type(error).__name__
        if isinstance(error, RuntimeError) and recast and "dtype" in str(error):
            raise _mixed(error) from error
        return f"the model does not run on its example, so what was traced was not compared with it ({kind}: {error})"
    traced, _ = _run(exported, given, exported.buffers())
    for place, (ours, theirs) in enumerate(zip(traced, eager, strict=False)):
        if not _close(ours, theirs):
            if random:
                return "the model draws random numbers, others when it is traced: what was traced could not be compared"
            raise _other(place, ours, theirs)
    changed = [name for name, value in kept[1].items() if kept[0].get(name) != value]
    counts = [name for name in changed if kept[1][name] != kept[2].get(name)]
    if counts or not (random or all(map(_close, again, eager))):
        raise _keeps(counts or changed)
    return ""


def _attributes(program: nn.Module, around: Surroundings) -> dict[str, str]:
    """What modules hold beside parameters, buffers and modules, as text (of a tensor, that there is one); and what the
    code reads beside these."""
    said = Contents(Names()).said
    own = {
        f"{path}.{name}".removeprefix(MODEL): said(value)
        for path, module in program.named_modules()
        for name, value in vars(module).items()
        if name not in STATE
    }
    return own | around.named()


def _keeps(names: list[str]) -> Error:
    return Error(
        "the model keeps something from call to call",
        where=", ".join(names),
        expected="a forward that changes no attributes of modules, or none that the next call sees",
        got="another value after each call on the same input",
        remedy="make it a buffer: self.register_buffer(name, torch.tensor(0)), and self.name.add_(1) in forward; or "
        "hand it in as an argument, and give it back with the results",
    )


def _mixed(error: RuntimeError) -> Error:
    return Error(
        "the model does not run in the dtype in which it is to compute",
        where="Hints(compute=...)",
        expected="a model that casts what it keeps in another dtype, such as a buffer, before it multiplies by it",
        got=str(error).splitlines()[0],
        remedy="register such buffers in that dtype, or cast them in forward; or name the modules that compute as they "
        "are: Compute(..., keep=...)",
    )


def _other(place: int, ours: Tensor, theirs: Tensor) -> Error:
    got, expected = (f"shape {tuple(each.shape)}" for each in (ours, theirs))
    if ours.shape == theirs.shape:
        at = (wide(ours) - wide(theirs)).abs().nan_to_num(nan=torch.inf).argmax()
        got, expected = (f"{each.flatten()[at].item():.6g}" for each in (ours, theirs))
    return Error(
        "the model computes something else when it is traced",
        where=f"result {place} of the model and its loss, on the example inputs",
        expected=f"{expected}, as the model gives",
        got=f"{got}, as it was traced",
        remedy="look for code that asks whether it is traced or compiled (torch.compiler.is_compiling(), "
        "torch.jit.is_tracing()), and let it do the same in both; in transformers, masks are made in two ways: "
        "pass the one that is meant as attention_mask",
    )


def _run(
    call: Callable[..., Iterable[Tensor]], given: tuple[Tensor, ...], kept: Iterable[Tensor]
) -> tuple[list[Tensor], bool]:
    """The results of a call, and whether it drew random numbers; ``kept`` tensors are afterwards as they were."""
    before = [(each, each.detach().clone()) for each in kept]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        state = torch.get_rng_state()
        own = [each.detach().clone().requires_grad_(each.requires_grad) for each in given]  # which may be written into
        results = [each.detach() for each in call(*own)]
        drawn = not torch.equal(state, torch.get_rng_state())
    with torch.no_grad():
        for each, was in before:
            each.copy_(was)
    return results, drawn


def _close(ours: Tensor, theirs: Tensor) -> bool:
    """Whether the difference is one of rounding, of what is largest."""
    if ours.shape != theirs.shape:
        return False
    if not ours.is_floating_point() and not ours.is_complex():
        return torch.equal(ours, theirs)
    bound = torch.finfo(ours.dtype).eps ** 0.5
    scale = wide(theirs).abs().nan_to_num(0, 0, 0).max().item() if theirs.numel() else 0.0
    return torch.allclose(wide(ours), wide(theirs), rtol=bound, atol=bound * scale, equal_nan=True)

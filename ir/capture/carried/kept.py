"""What a program of a model keeps beside parameters, and what is said of it where the next call sees it."""

from __future__ import annotations

import dis
import linecache
from collections.abc import Sequence
from types import FunctionType

from torch import nn

from shardfx.ir.capture.intake.contents import STATE, Contents
from shardfx.ir.capture.intake.explained import user_frame
from shardfx.ir.capture.intake.refusals import said
from shardfx.ir.capture.intake.surroundings import Surroundings
from shardfx.ir.capture.named.code_names import Names, codes, led_to
from shardfx.ir.errors import Error
from shardfx.ir.graph import Where

MODEL = "model."
"""Where the model stands in a program of it and its loss."""


def attributes(program: nn.Module, around: Surroundings, contents: Contents | None = None) -> dict[str, str]:
    """What modules hold beside parameters and modules, as text (of a tensor, that there is one); and what the code
    reads beside these."""
    said = (contents or Contents(Names())).said
    own = {
        f"{path}.{name}".removeprefix(MODEL): said(value)
        for path, module in program.named_modules()
        for name, value in (vars(module) | module._buffers).items()
        if name not in STATE
    }
    return own | around.named()


def keeps(names: Sequence[str], got: str, program: nn.Module, around: Surroundings) -> Error:
    """What is said of a program that keeps something under these names."""
    line = _line(names[0], program, around) if names else ""
    return Error(
        "the model keeps something from call to call",
        where=", ".join(names) + (f": {line}" if line else ""),
        expected="a forward that changes no attributes of modules, or none that the next call sees",
        got=got,
        remedy="make it a buffer: self.register_buffer(name, torch.tensor(0)), and self.name.add_(1) in forward; or "
        "hand it in as an argument, and give it back with the results",
    )


def not_known(error: Exception, model: nn.Module) -> Error:
    """What is said of a model that cannot be called once more without numbers."""
    return Error(
        "the model changes what it holds, and it cannot be known whether the next call sees it",
        where=user_frame(error, model),
        expected="a forward that changes no attributes of modules, or that runs without numbers once more",
        got=f"{type(error).__name__}: {error}"[:300],
        remedy="hold what is the same at each call before parallelize, as a buffer, and leave the rest out",
    )


SETS = ("STORE_ATTR", "STORE_GLOBAL", "STORE_DEREF", "DELETE_ATTR")


def _line(name: str, program: nn.Module, around: Surroundings) -> str:
    """The line of code that sets an attribute or a variable, or else the first that names it."""
    path, _, own = (MODEL + name).rpartition(".")
    module = dict(program.named_modules()).get(path)
    functions = [*led_to(type(module))] if module is not None else []
    functions += [each for each in around.walk() if isinstance(each, FunctionType)]
    every = [each for function in functions for each in codes(function.__code__)]
    found = [
        (ins.opname not in SETS, code.co_filename, ins.positions.lineno)
        for code in every
        for ins in dis.get_instructions(code)
        if ins.argval == own and ins.positions is not None and ins.positions.lineno
    ]
    if not found:
        return ""
    _, file, line = min(found, key=lambda each: each[0])
    return said(Where("", file, line, linecache.getline(file, line).strip()))

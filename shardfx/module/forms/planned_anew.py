"""Numbers that change from call to call, each of which is planned anew: a script is told so, once, and how not to.

A number is a part of a program: the code may go by it (``if lam > 0.5``, ``x[:step]``), and what it computes of it is
there as a constant. A tensor without dims is an input of one program for all.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

from shardfx.ir.errors import Error, ShardfxWarning
from shardfx.module.call import Form

ENOUGH = 3
"""Plans that differ in a number alone, until it is said."""
READ = "what the code reads: "


class PlannedAnew:
    """The values for which programs were planned, of what differed alone."""

    def __init__(self) -> None:
        self._values: dict[str, set[object]] = {}

    def see(self, form: Form, known: Iterable[Form]) -> None:
        """A form was planned beside those that are known; warns where it is another one in the same number again."""
        for other in known:
            for name, (theirs, mine) in alone(form, other).items():
                values = self._values.setdefault(name, {theirs})
                if mine in values:
                    continue
                values.add(mine)
                if len(values) == ENOUGH:
                    warnings.warn(_said(name, mine), ShardfxWarning, stacklevel=2)


@contextmanager
def said_of(first: Form, form: Form) -> Iterator[None]:
    """Errors within are of a call of a form that was planned anew: they say how it differs from the first one."""
    try:
        yield
    except Error as error:
        if not first.serves(form):
            error.in_call(first.difference(form))
        raise


def alone(form: Form, other: Form) -> Mapping[str, tuple[object, object]]:
    """The numbers in which two forms differ, theirs and its own, if they differ in nothing else."""
    names = [name for name in {**other.inputs, **form.inputs} if form.inputs.get(name) != other.inputs.get(name)]
    pairs = {name: (other.inputs.get(name), form.inputs.get(name)) for name in names}
    around = replace(form, inputs={}, state=0, changed=()) == replace(other, inputs={}, state=0, changed=())
    if not around or not all(_is_number(each) for pair in pairs.values() for each in pair):
        return {}
    if form.state == other.state:
        return pairs
    return {READ + ", ".join(form.changed[:3]): (other.state, form.state)} if not pairs and form.changed else {}


def _is_number(given: object) -> bool:
    return isinstance(given, tuple) and given[0] in ("int", "float")


def _said(name: str, value: object) -> str:
    what = name.removeprefix(READ)
    begun = f"programs were planned for {ENOUGH} values of {what}"
    if name.startswith(READ):
        return (
            f"{begun}, which the code reads, and each further one is planned anew: what changes at each step is better "
            "a tensor among the targets, or a buffer of the model"
        )
    number = value[1] if isinstance(value, tuple) else value
    return (
        f"{begun}, the last one {number}, and each further one is planned anew: pass torch.tensor({number}), which is "
        "an input of one program for all, where the code does not go by the number"
    )

"""The state in which is what a model's code reads beside its inputs, as all ranks say it.

    if rank == 0:
        model.save_pretrained(folder)          # which writes into model.config, on one rank alone

Each rank numbers the states that it has seen. What a rank reads may be its own if it leads to the plan that the others
make: where ranks come to a call in states of other numbers they plan together, which compares their plans, and from
then on say one number for the states in which they were.
"""

from __future__ import annotations

from dataclasses import replace

from shardfx.module.call import Form


class StatesAsOne:
    """The numbers of states, as ranks say them."""

    def __init__(self) -> None:
        self._said: dict[int, int] = {}
        self._times = 0

    def said(self, form: Form) -> Form:
        """The form, with the number that all ranks say."""
        return replace(form, state=self._said[form.state]) if form.state in self._said else form

    def own(self, form: Form) -> int:
        """This rank's number for a form's state."""
        return next((own for own, said in self._said.items() if said == form.state), form.state)

    def join(self, own: int) -> None:
        """All ranks were found to be in states of other numbers, this one in its ``own``; no rank has programs for the
        number that they say from now on."""
        self._times += 1
        self._said[own] = -self._times

"""Does a model carry something from a call to one in another form: of another size, in evaluation?"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.utils._pytree as pytree

from shardfx.ir.capture.intake.surroundings import Surroundings
from shardfx.ir.capture.model_and_loss import ModelAndLoss, Results
from shardfx.ir.capture.named.code_names import one_where_asked

from .earlier import Earlier
from .two_calls import Called, reject_carried


def trained_by(forms: Sequence[Earlier]) -> frozenset[str]:
    """The names of what calls train."""
    return frozenset(name for each in forms if each.loss is not None for name in each.gradients)


def between_forms(call: Called, forms: Sequence[Earlier]) -> None:
    """Raise if a call and those in other ``forms`` carry something from one to another.

    Raises:
        Error: they do, or it cannot be known whether they do.
    """
    program = call.program
    trained = trained_by(forms)
    for form in forms:
        if not form.keeps and not program.results.keeps:
            continue
        leaves, tree = pytree.tree_flatten((form.args, dict(form.kwargs), form.targets))
        given = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        around = Surroundings(program.model, form.loss if form.loss is not None else program.loss)
        further = (
            Results(),
            program.guard,
            program.compute,
            program.by_example,
            one_where_asked(given, around.names.named),
        )
        other = ModelAndLoss(program.model, tree, leaves, form.loss, len(form.targets), *further)
        earlier = Called(other, given, form)
        if form.keeps:
            reject_carried(call, around, earlier, trained)
            if program.loss is not None and not trained:  # now there is something that changes between its calls
                own = program.model.named_parameters()
                reject_carried(earlier, around, None, {name for name, each in own if each.requires_grad})
        if program.results.keeps:
            reject_carried(earlier, around, call, trained)

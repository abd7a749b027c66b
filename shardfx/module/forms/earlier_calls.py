"""The calls that there are programs for, as a capture of another form of call wants them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import nn

from shardfx.compiled import Compiled
from shardfx.hints import Hints
from shardfx.ir.capture.hidden_state import EarlierCapture
from shardfx.module.call import Form


class Build(Protocol):
    """Plans a model for hints, behind the calls that there are plans for."""

    def __call__(self, model: nn.Module, hints: Hints, behind: Sequence[EarlierCapture] = ()) -> Compiled: ...


def earlier_call(form: Form, compiled: Compiled) -> EarlierCapture:
    """The call of which a plan was captured."""
    hints, keeps = compiled.hints, compiled.captured.keeps
    return EarlierCapture(hints.args, hints.kwargs, hints.targets, hints.loss, form.training, form.trainable, keeps)

"""Guards: what a program watches, for it is the model only for data that give what the example gave."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardfx.ir.errors import Error
from shardfx.ir.graph import Output

ELSEWHERE = "these data lead the model elsewhere than the example did"


def check_guards(outputs: Sequence[Output], out: Sequence[torch.Tensor]) -> None:
    """Raise where a watched value is another than for the example that the program was captured with.

    Raises:
        Error: naming the model's line, and both values.
    """
    for output, value in zip(outputs, out, strict=True):
        guard = output.guard
        if guard is None or guard.holds(value := value.cpu()):
            continue
        where = "  ".join(part for part in (str(guard.where), guard.where.code) if part)
        if guard.op:
            raise Error(
                f"{guard.op} cannot be computed of these data",
                where=where,
                expected="what it takes on one device, in all of the batch",
                got="something that it raises for: a matrix that is singular or not positive definite, a number that "
                "is none of a class or a chance, a condition that does not hold",
                remedy="call the model on one device, which says which; torch.linalg has forms such as inv_ex that "
                "say it in a tensor",
            )
        raise Error(
            ELSEWHERE,
            where=where,
            expected=f"{guard.expected!r:.200}, as for the example that was captured",
            got=f"{value.tolist()!r:.200}",
            remedy="parallelize the model once more, with an example that takes this way",
        )

"""Sums and products among values (:mod:`.arithmetic`)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .arithmetic import Product, Sum, plain, product, rounded
from .atoms import Atoms
from .values import V


class Sums(Atoms):
    """Makes the values of sums and products."""

    def as_sum(self, of: V) -> Sum:
        """A value as a sum: of parts, a number, or itself."""
        what = self.all_of(of)
        if isinstance(what, Sum):
            return what
        number = self.number(of)
        return Sum(0, ((of.number, 1),)) if number is None else Sum(number, ())

    def sum(self, of: Sum, shape: Sequence[int], dtype: torch.dtype) -> V:
        """The value of a sum."""
        if of.number:
            return self.constant(rounded(of.constant), shape, dtype)
        if of.constant == 0 and len(of.parts) == 1 and rounded(of.parts[0][1]) == 1:
            return V(of.parts[0][0])
        return self.atom(of, shape, dtype)

    def product(self, over: Sequence[V], under: Sequence[V] = ()) -> V:
        """The product of values of one shape and dtype, divided by others."""
        factor: int | float = 1
        found = []
        for values, divides in ((over, False), (under, True)):
            for each in values:
                by, one = self.scaled(each)
                divisible = not divides or isinstance(by, float)
                if plain(by) and divisible:
                    factor = factor / by if divides else factor * by
                else:
                    one = each
                if one is not None:
                    what = self.all_of(one)
                    what = what if isinstance(what, Product) else Product(((one.number, 1),))
                    found.append(what.inverse() if divides else what)
        first = self[(*over, *under)[0]]
        whole = product(found)
        if not found or not plain(factor):
            return self.sum(Sum(factor, ()), first.shape, first.dtype) if not found else self._plain(over, under)
        alone = whole.alone
        value = V(alone) if alone is not None else self.atom(whole, first.shape, first.dtype)
        return self.sum(self.as_sum(value).times(factor), first.shape, first.dtype) if rounded(factor) != 1 else value

    def _plain(self, over: Sequence[V], under: Sequence[V]) -> V:
        """The same where its factors, multiplied, are none to reckon with."""
        first = self[(*over, *under)[0]]
        parts = [Product(((v.number, 1),)) for v in over] + [Product((), ((v.number, 1),)) for v in under]
        return self.atom(product(parts), first.shape, first.dtype)

    def scaled(self, of: V) -> tuple[int | float, V | None]:
        """A number, and the value that is multiplied by it; or the number alone."""
        found = self.as_sum(of)
        if found.number:
            return found.constant, None
        if found.constant == 0 and len(found.parts) == 1:
            return found.parts[0][1], V(found.parts[0][0])
        return 1, of

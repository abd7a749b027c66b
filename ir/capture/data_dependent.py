"""Data-dependent Python: where a model's code asks for a tensor's content, the example answers, and a guard records it.

    if x.sum() > 0:             the branch that the example takes             guard: gt(sum(x), 0) is True
    n = mask.sum().item()       the example's number                          guard: sum(mask) is 5
    x[mask]                     x[nonzero_static(mask, size=5)]               guard: sum(mask) is 5

What functions assert of their inputs, and torch leaves out of a trace, is kept in any trace:

    F.one_hot(i, 4)                    i is looked up in 0, 1, 2, 3: any other raises, as on one device
    F.binary_cross_entropy(p, y)       a guard: no p and no y is below 0 or above 1
    torch._assert_async(ok)            a guard: ok is not zero
    Normal(mean, scale)                a guard: what the distribution validates is valid
    torch.cov(x, fweights=n)           written out; a guard: no n is below 0, and their sum is not 0
    x.data                             x.detach()

Real tensors go along with the fake ones (``fake_tensor_propagate_real_tensors``, as in torch's ``draft_export``), so
that an answer is there at once, and nothing in the traced program has a size that is not known.
"""

from __future__ import annotations

import linecache
import random
import sys
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._decomp import decomposition_table
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, torch_decomp_decompositions
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_iter, tree_map_only

from shardfx.ir.errors import Error
from shardfx.ir.graph import Guard, Where

from .source_locations import CAPTURE, describe, is_user_file

MASKS = (torch.bool, torch.uint8)


@contextmanager
def with_real_tensors() -> Iterator[None]:
    """Fake tensors that are made of real ones compute along with these; torch's random numbers stay as they are."""
    import torch._functorch.config as config

    with config.patch(fake_tensor_propagate_real_tensors=True), torch.random.fork_rng(devices=[]):
        yield


def stored(model: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers of a model, by all their names."""
    named = (model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
    return {name: tensor for each in named for name, tensor in each}


@cache
def functional_variants() -> dict[Any, Any]:
    """In-place methods that are decomposed on fake tensors, with their functional variants: the real tensors that go
    along would be written into by the method, and again by its parts (``index_add_``)."""
    found = {}
    for op in decomposition_table:
        name = op._schema.name.partition("::")[2] if isinstance(op, OpOverload) else ""
        method, plain = getattr(Tensor, name, None), getattr(Tensor, name.removesuffix("_"), None)
        if name.endswith("_") and None not in (method, plain) and torch_decomp_decompositions(op):
            found[method] = plain
    return found


class UnknownContent(Error):
    """The code asks for the content of a tensor that has none."""


class DataGuards(TorchFunctionMode):
    """Answers for the tensors of a model that is traced: what functions assert; where it is traced
    ``with_real_tensors`` and ``guarded``, also their content; ``real`` are its stored tensors then. Without these
    nothing is known of what it is ``given``.

    ``values`` are the tensors that were asked for, ``guards`` what they were, and where.
    """

    def __init__(
        self, model: nn.Module, real: Mapping[str, Tensor] | None, guarded: bool, tensors: Sequence[Tensor] = ()
    ) -> None:
        super().__init__()
        self.guarded = guarded
        own = stored(model)
        for name, actual in (real or {}).items():
            if isinstance(tensor := own[name], FakeTensor):  # torch brings plain tensors' content along, no parameter's
                with _disable_current_modes():
                    tensor.real_tensor = actual.detach().clone()
        for tensor in (*tensors, *own.values()) if real is None else ():
            if isinstance(tensor, FakeTensor):
                tensor.real_tensor = None
        self._paths = {id(module): path for path, module in model.named_modules()}
        self.of_loss = False
        self.at: Where | None = None
        """The source location of the node that runs, where a graph runs and not the user's code."""
        self.guards: list[Guard] = []
        self.values: list[Tensor] = []
        self._foreign = _foreign_generators()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.reject_foreign_random()
        if (wanted := INPUT_ASSERTIONS.get(func)) is not None:
            return wanted(self, func, *args, **kwargs)
        if not self.guarded:
            return func(*args, **kwargs)
        if isinstance(func, OpOverload) and not any(isinstance(each, FakeTensor) for each in tree_iter((args, kwargs))):
            with _disable_current_modes():  # what real tensors compute beside the fake ones is none of what is traced
                return func(*args, **kwargs)
        if func in functional_variants():
            return args[0].copy_(functional_variants()[func](*args, **kwargs))
        answer = ANSWERS.get(func)
        if answer is None or not any(_is_unknown(each) for each in tree_iter((args, kwargs))):
            return func(*args, **kwargs)
        return answer(self, func, *args, **kwargs)

    def reject_foreign_random(self) -> None:
        """Refuse random numbers of Python or numpy, which would be drawn once.

        Raises:
            Error: some were drawn since the mode was made: at the call of torch behind that, or at none.
        """
        now = _foreign_generators()
        drawn = next((name for name, state in now.items() if self._foreign.get(name, state) != state), "")
        if drawn:
            raise Error(
                f"the model draws random numbers of {drawn}'s, which would be the same at every call",
                where=describe(self._where()) or None,
                expected="random numbers of torch's, or inputs",
                got=f"a forward that advances {drawn}'s generator",
                remedy="torch.rand(...), and torch.where to choose by it; or draw it outside of the model and pass the "
                "number as an argument",
            )

    def decide(self, tensor: Tensor) -> Any:
        """The content of a tensor, as ``tolist()`` gives it; from here on it is guarded.

        Raises:
            NotKnown: the example had no content.
        """
        if not _is_unknown(tensor):
            return tensor.tolist()
        where = self._where()
        real = tensor.real_tensor  # type: ignore[attr-defined]
        if real is None:
            raise UnknownContent(
                "the model's control flow depends on what is not known here",
                where=f"{where}  {where.code}".strip(),
                expected="weights and example inputs with content",
                got=f"a tensor of shape {tuple(tensor.shape)} without",
            )
        with _disable_current_modes():
            expected = real.tolist()
        self.guards.append(Guard(expected, where, self.of_loss))
        self.values.append(tensor.detach().clone())  # as it is here, whatever is written into it later
        return expected

    def wants(self, wrong: Tensor, op: str) -> None:
        """Guard that ``wrong`` is nowhere true; where it is, ``op`` raises."""
        self.guards.append(Guard(False, self._where(), self.of_loss, op=op))
        self.values.append(wrong.any())

    def number(self, tensor: Tensor) -> Any:
        """The content of a tensor of one element."""
        return self.decide(tensor.reshape(()))

    def columns(self, mask: Tensor) -> tuple[Tensor, ...]:
        """The indices of a mask's nonzero elements, a tensor for each dim: as many as in the example."""
        count = self.decide((mask if mask.dtype == torch.bool else mask.ne(0)).sum())
        return torch.nonzero_static(mask, size=count).unbind(1)

    def index(self, index: Any, masks: bool = True) -> tuple[Any, ...]:
        """An index without masks (if these are to go), and without numbers that are tensors."""
        found: list[Any] = []
        for each in index if isinstance(index, tuple) else (index,):
            if isinstance(each, Tensor) and each.dtype in MASKS and each.ndim and _is_unknown(each):
                found += self.columns(each) if masks else [each]
            elif isinstance(each, slice):
                found.append(slice(*(self.plain(part) for part in (each.start, each.stop, each.step))))
            else:
                found.append(self.plain(each))
        return tuple(found)

    def plain(self, arg: Any) -> Any:
        """An int in place of an integer tensor of one element."""
        is_number = _is_unknown(arg) and not arg.ndim and arg.dtype not in MASKS and not arg.is_floating_point()
        return self.decide(arg) if is_number else arg

    def _where(self) -> Where:
        """The innermost module that runs, and the innermost line of the file that its code is in, of the user's code
        if there is some."""
        if self.at is not None:
            return self.at
        lines: list[Where] = []
        module = "loss" if self.of_loss else ""
        home = ""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename != CAPTURE and not home:
            file, line = frame.f_code.co_filename, frame.f_lineno
            lines.append(Where("", file, line, linecache.getline(file, line).strip()))
            if id(frame.f_locals.get("self")) in self._paths:
                module, home = self._paths[id(frame.f_locals["self"])], file
            frame = frame.f_back
        users = [each for each in lines if is_user_file(each.file)]
        own = [each for each in users if each.file == home] or users or [each for each in lines if each.file == home]
        return replace(next(iter(own), Where()), module=module)


def _foreign_generators() -> dict[str, Hashable]:
    """The states of the process-wide generators of Python and numpy."""
    found: dict[str, Hashable] = {"Python": random.getstate()}
    if (numpy := sys.modules.get("numpy.random")) is not None:
        _, keys, place, *others = numpy.get_state()
        found["numpy"] = (keys.tobytes(), place, *others)
    return found


def _is_unknown(thing: object) -> bool:
    """Whether this is a tensor of unknown content: no constant of the code."""
    return isinstance(thing, FakeTensor) and thing.constant is None


# ---- functions that ask for content --------------------------------------------------------------------------------

Answer = Callable[..., Any]


def _truth(asked: DataGuards, func: Any, input: Tensor) -> Any:
    return asked.number(input if input.dtype == torch.bool else input.ne(0))


def _equal(asked: DataGuards, func: Any, input: Tensor, other: Tensor) -> Any:
    return input.shape == other.shape and asked.decide((input == other).all())


def _array(asked: DataGuards, func: Any, tensor: Tensor, **_: Any) -> Any:
    content = asked.decide(tensor)
    with _disable_current_modes():
        return torch.tensor(content, dtype=tensor.dtype).reshape(tensor.shape).numpy()


def _format(asked: DataGuards, func: Any, tensor: Any, how: str) -> str:
    """A text decides no branch: it is that of the example."""
    with _disable_current_modes():
        return format(tensor if tensor.ndim or tensor.real_tensor is None else tensor.real_tensor.item(), how)


def _nonzero(asked: DataGuards, func: Any, input: Tensor, *, as_tuple: bool = False) -> Any:
    if not input.ndim:
        return func(input, as_tuple=as_tuple)
    found = asked.columns(input)
    return found if as_tuple else torch.stack(found, 1)


def _where(asked: DataGuards, func: Any, condition: Tensor, *args: Any, **kwargs: Any) -> Any:
    if args or kwargs or not condition.ndim:
        return func(condition, *args, **kwargs)
    return asked.columns(condition)


def _masked_select(asked: DataGuards, func: Any, input: Tensor, mask: Tensor) -> Any:
    input, mask = torch.broadcast_tensors(input, mask)
    return input[asked.columns(mask)] if mask.ndim else func(input, mask)


def _set(asked: DataGuards, func: Any, tensor: Tensor, index: Any, value: Any) -> Any:
    many = isinstance(value, Tensor) and value.ndim > 0  # one number is written wherever the mask is
    return func(tensor, asked.index(index, masks=many), value)


def _repeat(asked: DataGuards, func: Any, input: Tensor, repeats: Any = None, dim: Any = None, **kwargs: Any) -> Any:
    counts = input if repeats is None else repeats
    options = () if repeats is None else (repeats,) if dim is None else (repeats, dim)
    if kwargs.get("output_size") is None and isinstance(counts, Tensor):
        size = counts.numel() if repeats is None else input.numel() if dim is None else input.shape[dim]
        kwargs["output_size"] = asked.decide(counts.reshape(-1).expand(size).sum())
    return func(input, *options, **kwargs)


def _bincount(asked: DataGuards, func: Any, input: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Any:
    size = max(asked.decide(input.max()) + 1 if input.numel() else 0, minlength)
    ones = torch.ones_like(input, dtype=torch.int64) if weights is None else weights.double()
    ones = ones if weights is None or weights.dtype != torch.float32 else weights
    return ones.new_zeros(size).scatter_add(0, input.long(), ones)


def _sized(asked: DataGuards, func: Any, *args: Any, **kwargs: Any) -> Any:
    own = [each for each in args[:1] if isinstance(each, Tensor) and each.ndim]
    rest = tree_map_only(Tensor, asked.plain, args[len(own) :])
    return func(*own, *rest, **tree_map_only(Tensor, asked.plain, kwargs))


def _functions(names: str, answer: Answer) -> dict[Any, Answer]:
    """The functions of these names: of ``torch``, of its tensors, or both."""
    found = [getattr(owner, name, None) for name in names.split() for owner in (torch, Tensor)]
    return {function: answer for function in found if function is not None}


ANSWERS: Mapping[Any, Answer] = {
    **_functions("item __float__ __complex__", lambda asked, func, x: asked.number(x)),
    **_functions("__int__ __index__", lambda asked, func, x: asked.number(x.to(torch.int64))),
    **_functions("__bool__ is_nonzero", _truth),
    **_functions("_assert", lambda asked, func, condition, message: func(asked.number(condition), message)),
    **_functions("tolist", lambda asked, func, x: asked.decide(x)),
    **_functions("numpy", _array),
    **_functions("__contains__", lambda asked, func, x, element: asked.decide((x == element).any())),
    **_functions("equal", _equal),
    **_functions("allclose", lambda asked, func, *pair, **how: asked.decide(torch.isclose(*pair, **how).all())),
    **_functions("__format__", _format),
    **_functions("nonzero argwhere", _nonzero),
    **_functions("where", _where),
    **_functions("masked_select", _masked_select),
    **_functions("__getitem__", lambda asked, func, x, index: func(x, asked.index(index))),
    **_functions("__setitem__", _set),
    **_functions("repeat_interleave", _repeat),
    **_functions("bincount", _bincount),
    **_functions("zeros ones empty full arange linspace new_zeros new_ones new_empty new_full", _sized),
    **_functions("view reshape expand repeat narrow split", _sized),
}
"""The answers to functions that read a tensor's content. All others are refused by torch."""


# ---- functions that assert something of their inputs ---------------------------------------------------------------


def _replaced(asked: DataGuards, func: Any, *_: Any) -> None:
    raise Error(
        "the model's code replaces what a tensor holds",
        expected="new tensors, or buffers that are written in place",
        got="x.data = ...",
        remedy="go on with the new tensor; of a buffer, self.name.copy_(...) under torch.no_grad()",
    )


def _one_hot(asked: DataGuards, func: Any, input: Tensor, num_classes: int = -1) -> Any:
    if num_classes == -1 and asked.guarded and _is_unknown(input):
        num_classes = asked.decide(input.max()) + 1
    if num_classes > 0 and input.numel():
        known = torch.arange(num_classes, device=input.device)
        input = known.index_select(0, input.reshape(-1)).reshape(input.shape)
    return func(input, num_classes)


def _of_chances(*names: str) -> Answer:
    """The answer to a function whose arguments of these names, by place, are chances: tensors from 0 to 1. Of an
    argument ``p`` it takes no others."""

    def answered(asked: DataGuards, func: Any, *args: Any, **kwargs: Any) -> Any:
        named = dict(zip(names, args, strict=False)) | kwargs
        for name in ["p"] if "p" in named else filter(None, names):
            if isinstance(chance := named.get(name), Tensor):
                chance = chance.detach()
                asked.wants((chance < 0) | (chance > 1), f"{func.__name__}, whose {name} is from 0 to 1,")
        return func(*args, **kwargs)

    return answered


class AllTrue:
    """The result of ``torch._is_all_true``, once it is a guard: true, and, as of torch 2.15, a tensor."""

    def __bool__(self) -> bool:
        return True

    def cpu(self) -> AllTrue:
        """Itself."""
        return self

    @classmethod
    def __torch_function__(cls, *_: Any) -> None:
        """Lets ``torch._assert_async`` take it."""


def _assert_async(asked: DataGuards, func: Any, condition: Tensor | AllTrue, message: str = "") -> None:
    if not isinstance(condition, AllTrue):
        asked.wants(condition.detach() == 0, f"torch._assert_async({message!r})")


def _all_true(asked: DataGuards, func: Any, each: Tensor) -> AllTrue:
    asked.wants(each.detach() == 0, "what asks whether all is true and raises else (a distribution that validates)")
    return AllTrue()


def _cov(
    asked: DataGuards,
    func: Any,
    input: Tensor,
    *,
    correction: int = 1,
    fweights: Tensor | None = None,
    aweights: Tensor | None = None,
) -> Any:
    """``torch.cov``, which in torch asks for the content of the divisor."""
    weights = [each for each in (fweights, aweights) if each is not None]
    rows = input if input.ndim == 2 else input.reshape(1, -1)
    if input.ndim > 2 or input.dtype == torch.bool or any(each.shape != rows.shape[1:] for each in weights):
        return func(input, correction=correction, fweights=fweights, aweights=aweights)  # which says what is wrong
    for each in weights:
        asked.wants(each.detach() < 0, "cov, whose weights are none below 0,")
    weight = weights[0] if len(weights) == 1 else weights[0] * weights[1] if weights else None
    total = torch.full((), rows.shape[1], device=input.device) if weight is None else weight.sum()
    if weight is not None:
        asked.wants(total.detach() == 0, "cov, whose weights are not all 0,")
    mean = (rows if weight is None else rows * weight).sum(1) / total
    rows = rows - mean.unsqueeze(1)
    left = total - correction
    if weight is not None and aweights is not None and correction:
        left = total - correction * (weight * aweights).sum() / total
    made = rows @ (rows if weight is None else rows * weight).mH
    return (made / torch.where(left > 0, left, torch.zeros_like(left))).squeeze()


def _corrcoef(asked: DataGuards, func: Any, input: Tensor) -> Any:
    if input.ndim > 2:
        return func(input)
    made = _cov(asked, torch.cov, input)
    if not made.ndim:
        return made / made
    spread = (made.diagonal().real if made.is_complex() else made.diagonal()).sqrt()
    made = made / spread[:, None] / spread
    return torch.complex(made.real.clip(-1, 1), made.imag.clip(-1, 1)) if made.is_complex() else made.clip(-1, 1)


def _ctc(asked: DataGuards, func: Any, *_: Any, **__: Any) -> None:
    raise Error(
        "ctc_loss cannot be captured: how much it keeps for its backward follows from the lengths that it is given",
        expected="ops whose results have shapes that follow from those of the inputs",
        got="F.ctc_loss",
        remedy="leave the loss out of Hints, and compute it outside: F.ctc_loss(pm(x), ...).backward()",
    )


INPUT_ASSERTIONS: Mapping[Any, Answer] = {
    Tensor.data.__get__: lambda asked, func, tensor, *_: tensor.detach(),  # type: ignore[attr-defined]
    Tensor.data.__set__: _replaced,  # type: ignore[attr-defined]
    F.one_hot: _one_hot,
    F.binary_cross_entropy: _of_chances("input", "target"),
    **_functions("bernoulli", _of_chances("input", "p")),
    Tensor.bernoulli_: _of_chances("", "p"),
    torch._assert_async: _assert_async,
    torch._is_all_true: _all_true,
    **_functions("cov", _cov),
    **_functions("corrcoef", _corrcoef),
    **dict.fromkeys((F.ctc_loss, torch.ctc_loss), _ctc),
}
"""The stand-in of each function in a trace."""

"""Comparison of what shardfx writes into a step with plain torch: on small tensors, once per plan.

    gradients divided by the loss scale and clipped, overflow, the scale itself     a small graph, by the same code
    parameters and inputs that are cast                                             a small module, by the same code
    batch norms of parts of the batch, and their running averages                   the same function

The small tensors have the dtypes of the model's own, with and without dims.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._python_dispatch import _disable_current_modes

from shardfx.ir.builder import GraphBuilder
from shardfx.ir.errors import Error
from shardfx.ir.graph import Graph, InputKind, Output, OutputKind, Phase, Value
from shardfx.ir.spec import TensorType

from .canonical.batch_norms import BatchParts, NormByParts, WideStatistics
from .canonical.mixed_precision import LossScale, MixedPrecision, sum_gradients_in
from .eager_comparison import RunOutputs, is_close, output_name
from .graph_interpreter import interpret
from .model_and_loss import ModelAndLoss, TraceResults
from .optimizer.gradient_scaling import SCALE, STEPS
from .optimizer.training_step import TrainingStep

aten = torch.ops.aten
Kind = tuple[torch.dtype, bool]
"""The kind of a parameter: its dtype, and whether it has dims."""
RATE = 0.5
LARGEST = 1e18
"""The largest gradient element here: its square is finite in float32."""


def compare_rewrites(
    graph: Graph, step: TrainingStep, compute: MixedPrecision | None, parts: BatchParts
) -> tuple[str, ...]:
    """Compare what is written into the step of a captured graph, before it is written; gives what was compared.

    Raises:
        Error: something is not what torch makes.
    """
    trained = {output.name for output in graph.outputs if output.kind is OutputKind.GRADIENT}
    parameters = [each for each in graph.of_kind(InputKind.PARAMETER) if each.name in trained]
    kinds: list[Kind] = list(dict.fromkeys((each.value.type.dtype, bool(each.value.shape)) for each in parameters))
    loss = next((output.value.type.dtype for output in graph.outputs if output.kind is OutputKind.LOSS), torch.float32)
    checks: dict[str, Callable[[], None]] = {}
    if kinds and (step.scale is not None or step.clip is not None):
        checks["gradients that are scaled and clipped"] = partial(_gradients, graph, kinds, step, compute, loss)
    if compute is not None and (compute.dtype or compute.output_dtype):
        checks["casts"] = partial(_casts, kinds, compute)
    if parts.count > 1:
        checks["batch norms of parts of the batch"] = partial(_parts, kinds, parts)
    with _disable_current_modes(), torch.device("cpu"), torch.enable_grad(), torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)  # `torch.manual_seed` would seed GPUs, too
        for check in checks.values():
            check()
    return tuple(checks)


def _check(what: str, ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> None:
    """Raise where two runs differ by more than rounding.

    Raises:
        Error: naming the first number that differs.
    """
    for name, other in theirs.items():
        mine = ours[name]
        if mine.dtype is not other.dtype or not is_close(mine, other):
            raise Error(
                f"{what} are not what torch makes, on small tensors",
                where=name,
                expected=f"{other.dtype}: {other.flatten().tolist()[:4]}",
                got=f"{mine.dtype}: {mine.flatten().tolist()[:4]}",
                remedy="please report it, with the versions of torch and shardfx; without the hint the plan is right",
            )


# ---- gradients ----------------------------------------------------------------------------------------------------


def _gradients(
    graph: Graph, kinds: Sequence[Kind], step: TrainingStep, compute: MixedPrecision | None, loss: torch.dtype
) -> None:
    """A step of plain gradient descent, with what is written before and behind it; of gradients below the norm at
    which they are clipped, above it, and infinite where the loss is scaled."""
    small = _small_step(graph, kinds, step, compute, loss)
    scale = step.scale.init if isinstance(step.scale, LossScale) else float(step.scale or 1.0)
    steps = float(step.scale.interval - 1) if isinstance(step.scale, LossScale) else 0.0
    for number, size in enumerate((0.1, 10.0, *([float("inf")] if step.scale is not None else []))):
        values: dict[str, Tensor] = {"loss": torch.zeros((), dtype=loss)}
        values |= {
            name: torch.tensor(content, dtype=torch.float64) for name, content in ((SCALE, scale), (STEPS, steps))
        }
        for i, (dtype, dims) in enumerate(kinds):
            most = min(torch.finfo(dtype.to_real()).max / 8, LARGEST)
            by = min(size * scale * (step.clip or 1.0), most) if size < float("inf") or i else size
            values |= {f"w{i}": _drawn(dtype, dims), f"args.{i}": _drawn(dtype, dims) * by}
        env = interpret(small, {each.name: values[each.name] for each in small.inputs})
        ours = {
            output_name(output): env[output.value] for output in small.outputs if output.kind is not OutputKind.LOSS
        }
        theirs = _plain_step(values, len(kinds), step, loss)
        if size == float("inf"):
            theirs = {name: each for name, each in theirs.items() if not name.startswith("gradient")}
        _check("gradients that are scaled and clipped", ours, {n: each for n, each in theirs.items() if n in ours})
        steps *= number == 0


def _drawn(dtype: torch.dtype, dims: bool) -> Tensor:
    """Numbers between 1/2 and 1 of either sign."""
    made = torch.rand((2, 3) if dims else (), dtype=torch.complex128 if dtype.is_complex else torch.float64)
    return (
        ((made / 2 + made.sgn() / 2) * (-1) ** torch.arange(made.shape[-1] if dims else 1))
        .reshape(made.shape)
        .to(dtype)
    )


def _small_step(
    graph: Graph, kinds: Sequence[Kind], step: TrainingStep, compute: MixedPrecision | None, loss: torch.dtype
) -> Graph:
    builder = GraphBuilder(graph.mesh)
    small, gradients = builder.graph, list[Value]()
    small.outputs.append(Output(OutputKind.LOSS, "loss", builder.input(InputKind.TARGET, "loss", TensorType((), loss))))
    if isinstance(step.scale, LossScale):
        builder.input(InputKind.STATE, SCALE, TensorType((), torch.float64))
    builder.phase = Phase.BACKWARD
    for i, (dtype, dims) in enumerate(kinds):
        type = TensorType((2, 3) if dims else (), dtype)
        builder.input(InputKind.PARAMETER, f"w{i}", type)
        gradients.append(builder.add(aten.clone.default, (builder.input(InputKind.ARGUMENT, f"args.{i}", type),)))
        small.outputs.append(Output(OutputKind.GRADIENT, f"w{i}", gradients[-1]))
    if compute is not None:
        sum_gradients_in(small, compute.sums)
    step.write_gradients(small)
    if step.optimizer is not None:
        builder.phase = Phase.UPDATE
        for output in [each for each in small.outputs if each.kind is OutputKind.GRADIENT]:
            before = small.input(output.name).value
            new = builder.add(aten.sub.Tensor, (before, output.value), before.type, alpha=RATE)
            small.outputs.append(Output(OutputKind.PARAMETER, output.name, new))
        step.skip_and_adapt(small)
    return small


def _plain_step(values: Mapping[str, Tensor], count: int, step: TrainingStep, loss: torch.dtype) -> RunOutputs:
    """The reference step by torch.optim and torch.nn.utils, in float64, rounded at its end."""
    parameters = [nn.Parameter(_wide(values[f"w{i}"])) for i in range(count)]
    scale = values[SCALE].item() if isinstance(step.scale, LossScale) else float(step.scale or 1.0)
    for i, parameter in enumerate(parameters):
        parameter.grad = _wide(values[f"args.{i}"]) / scale
    finite = all(bool(parameter.grad.isfinite().all()) for parameter in parameters if parameter.grad is not None)
    if step.clip is not None:
        nn.utils.clip_grad_norm_(parameters, step.clip)
    if finite or step.scale is None:
        torch.optim.SGD(parameters, lr=RATE).step()
    made: RunOutputs = {}
    for i, parameter in enumerate(parameters):
        assert parameter.grad is not None
        dtype = values[f"w{i}"].dtype
        made |= {f"gradient w{i}": parameter.grad.to(dtype), f"parameter w{i}": parameter.detach().to(dtype)}
    if isinstance(step.scale, LossScale):
        well = values[STEPS].item() + 1 if finite else 0.0
        grows = well >= step.scale.interval
        by = 1.0 if finite else step.scale.backoff
        if grows and scale * step.scale.growth <= torch.finfo(loss).max:
            by = step.scale.growth
        made[f"state {SCALE}"] = torch.tensor(scale * by, dtype=torch.float64)
        made[f"state {STEPS}"] = torch.tensor(0.0 if grows else well, dtype=torch.float64)
    return made


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


# ---- casts --------------------------------------------------------------------------------------------------------


class _Layer(nn.Module):
    """A product with a parameter of each kind."""

    def __init__(self, kinds: Sequence[Kind]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(_drawn(*kind) for kind in kinds)

    def forward(self, x: Tensor) -> Tensor:
        for each in self.weights:
            x = x * (torch.view_as_real(each).sum(-1) if each.is_complex() else each)
        return x


class _Model(nn.Module):
    """A layer that is cast, one that is kept, and a norm with running statistics."""

    shift: Tensor

    def __init__(self, kinds: Sequence[Kind]) -> None:
        super().__init__()
        self.layer, self.kept, self.norm = _Layer(kinds), _Layer(kinds), nn.BatchNorm1d(3, dtype=torch.float32)
        self.register_buffer("shift", torch.ones(3, dtype=torch.float16))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(self.kept(self.layer(x))) + self.shift
        return out


def _casts(kinds: Sequence[Kind], compute: MixedPrecision) -> None:
    model, x = _Model(kinds), torch.rand(2, 3, dtype=torch.float32)
    leaves, tree = pytree.tree_flatten(((x,), {}, ()))
    own = replace(compute, keep="kept" if compute.dtype is not None else ())
    program = ModelAndLoss(model, tree, leaves, torch.sum, 0, TraceResults(), compute=own)
    runs: list[RunOutputs] = []
    for run in (program, partial(_plain_casts, model, own)):
        model.zero_grad()
        leaf = x.detach().clone().requires_grad_()
        loss, result = run(leaf)
        loss.backward()
        assert leaf.grad is not None
        grads = {f"gradient {name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
        runs.append({"loss": loss.detach(), "result 0": result, "gradient args.0": leaf.grad, **grads})
    _check("casts", runs[0], runs[1])


def _plain_casts(model: _Model, compute: MixedPrecision, x: Tensor) -> tuple[Tensor, Tensor]:
    """The reference by plain torch: the loss and the result."""

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(compute.dtype) if compute.dtype is not None and tensor.is_floating_point() else tensor

    y = functional_call(model.layer, {name: cast(p) for name, p in model.layer.named_parameters()}, (cast(x),))
    for module in (model.kept, model.norm) if compute.dtype is not None else ():
        own = next((p.dtype for p in module.parameters() if p.is_floating_point()), compute.dtype)
        y = cast(module(y.to(own)))
    y = (y if compute.dtype is not None else model.norm(model.kept(y))) + model.shift
    y = y.to(compute.output_dtype) if compute.output_dtype is not None else y
    return y.sum(), y.detach()


# ---- batch norms of parts -----------------------------------------------------------------------------------------


def _parts(kinds: Sequence[Kind], parts: BatchParts) -> None:
    for dtype in dict.fromkeys(dtype for dtype, _ in kinds if dtype.is_floating_point):
        x = torch.rand(3 * parts.count, 2, 2).to(dtype)
        weight, bias = torch.rand(2).to(dtype), torch.rand(2).to(dtype)
        for momentum in (0.1, 0.75):
            runs: list[RunOutputs] = []
            for normalise in (WideStatistics(NormByParts(parts)), partial(_plain_parts, parts)):
                stats = torch.linspace(-1, 1, 2).to(dtype), torch.linspace(1, 2, 2).to(dtype)
                own = x.clone().requires_grad_()
                out = normalise(own, weight, bias, *stats, True, momentum, 1e-5, False)
                (out * torch.arange(out.numel()).view_as(out).cos()).sum().backward()
                assert own.grad is not None
                made = (out.detach(), own.grad, *stats)
                runs.append(
                    dict(zip(("result 0", "gradient args.0", "running_mean", "running_var"), made, strict=True))
                )
            _check("batch norms of parts of the batch", runs[0], runs[1])


def _plain_parts(
    parts: BatchParts, x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, var: Tensor, *how: object
) -> Tensor:
    """The reference, part by part: sequential micro-batches, or replicas whose running statistics are averaged."""
    made, stats = [], []
    wide = [each.double() for each in (weight, bias, mean, var)]
    own = wide[2:]  # each part has its own, which the backward may read
    for part in x.double().chunk(parts.count):
        own = [each.clone() for each in (own if parts.one_by_one else wide[2:])]
        made.append(F.batch_norm(part, own[0], own[1], wide[0], wide[1], True, float(how[1]), float(how[2])))  # type: ignore[arg-type]
        stats.append(own)
    for kept, each in zip((mean, var), zip(*stats, strict=True), strict=True):
        kept.copy_(each[-1] if parts.one_by_one else torch.stack(each).mean(0))
    return torch.cat(made).to(x.dtype)

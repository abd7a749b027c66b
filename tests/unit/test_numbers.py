"""A step's calls whose number is a value: they give what the op gives for that number, in every dtype."""

from __future__ import annotations

import pytest
import torch

from shardfx.ir.builder import GraphBuilder
from shardfx.ir.capture.graph_interpreter import interpret
from shardfx.ir.capture.optimizer.emit_update import FORMS, call_with_numbers
from shardfx.ir.graph import InputKind
from shardfx.ir.mesh import Mesh
from shardfx.ir.spec import TensorType

aten = torch.ops.aten
NUMBER = 0.77
COUNT = 384
"""Of elements: a multiple of what a kernel takes at once, for it rounds the rest of bfloat16s in another way."""
TWO, THREE = (aten.add.Tensor, aten.sub.Tensor, aten.lerp.Scalar), (aten.addcmul.default, aten.addcdiv.default)
OPERANDS = dict.fromkeys(TWO, 2) | dict.fromkeys(THREE, 3)
"""How many tensors an op takes; one, if it is not named."""
SAME = (torch.float64, torch.float32, torch.bfloat16)
MIXED = ((torch.float64, torch.bfloat16), (torch.float32, torch.bfloat16), (torch.float64, torch.float32))


def given_and_written(op, dtypes):
    """What an op gives for a number, and what is written for a value gives."""
    drawn = torch.Generator().manual_seed(0)
    tensors = [(torch.rand(COUNT, generator=drawn, dtype=torch.float64) + 0.5).to(dtype) for dtype in dtypes]
    builder = GraphBuilder(Mesh(dp=1))
    examples = {str(i): tensor for i, tensor in enumerate((*tensors, torch.tensor(NUMBER, dtype=torch.float64)))}
    types = {name: TensorType(tuple(tensor.shape), tensor.dtype) for name, tensor in examples.items()}
    *values, number = (builder.input(InputKind.ARGUMENT, name, type) for name, type in types.items())
    names = [argument.name for argument in op._schema.arguments]
    said = {names[-1]: number} if op._schema.arguments[-1].kwarg_only else {}
    args = tuple(values) if said else (*values, number)
    made = call_with_numbers(builder, op, args, said)
    keyed = dict.fromkeys(said, NUMBER)
    return op(*(tensors if said else (*tensors, NUMBER)), **keyed), interpret(builder.graph, examples)[made]


@pytest.mark.parametrize("op", FORMS, ids=str)
@pytest.mark.parametrize("dtype", SAME, ids=str)
def test_every_rewrite_equals_the_op(op, dtype):
    expected, written = given_and_written(op, (dtype,) * OPERANDS.get(op, 1))
    assert written.dtype == expected.dtype
    apart = (written.double() - expected.double()).abs()
    assert apart.max() <= 4 * torch.finfo(dtype).eps * expected.abs().max()
    if dtype is torch.bfloat16:
        assert (apart > 0).double().mean() < 0.01


@pytest.mark.parametrize("op", TWO[:2], ids=str)
@pytest.mark.parametrize("dtypes", MIXED, ids=str)
def test_operand_of_another_dtype_is_not_rounded_first(op, dtypes):
    expected, written = given_and_written(op, dtypes)
    assert written.dtype == expected.dtype == dtypes[0]
    assert (written - expected).abs().max() <= 2 * torch.finfo(dtypes[0]).eps

"""The checks that every op passes in the CPU session, in the interpreter and on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map_only

from builders.kernels.triton_runtime import torch_implementations
from tests.ops.sample import Op

_AROUND = 1 << 15
"""Elements on either side: more than a kernel's tile extends beyond its operand."""


class Placed:
    """An operand inside a buffer of poison, with its own strides, or with gaps between its rows."""

    def __init__(self, part: torch.Tensor, device: torch.device, *, gaps: bool = False):
        strides = _with_gaps(part.shape) if gaps else part.stride()
        span = 1 + sum((size - 1) * stride for size, stride in zip(part.shape, strides, strict=True))
        self.buffer = _poison(span + 2 * _AROUND, part.dtype, device)
        self.view = self.buffer.as_strided(part.shape, strides, _AROUND)
        self.view.copy_(part)

    def assert_alone(self) -> None:
        """Raise AssertionError if anything but the operand was written. Destroys the operand."""
        poison = _poison(len(self.buffer), self.buffer.dtype, self.buffer.device)
        # A copied bool would be 0 or 1.
        view, wanted = (x.view(torch.uint8) if x.dtype is torch.bool else x for x in (self.view, poison))
        view.copy_(wanted[0])
        assert torch.equal(_bits(self.buffer), _bits(poison))


def check_op(op: Op, sample: Sequence[Any], device: torch.device, *, gaps: bool = False) -> None:
    """Raise AssertionError unless the kernel, amid poison, returns what the reference does and writes nothing else."""
    wanted = tree_map_only(torch.Tensor, torch.clone, [*sample])
    with torch_implementations():
        returned = op.call(*wanted)
    parameters = op.call._schema.arguments
    strided = [gaps and parameter.name in op.strided for parameter in parameters]
    placed: list[Placed] = []

    def place(part: torch.Tensor, gaps: bool) -> torch.Tensor:
        placed.append(Placed(part, device, gaps=gaps))
        return placed[-1].view

    arguments = [
        tree_map_only(torch.Tensor, lambda part, gaps=gaps: place(part, gaps), argument)
        for argument, gaps in zip(sample, strided, strict=True)
    ]
    found = op.call(*arguments)
    for parameter, argument, right in zip(parameters, arguments, wanted, strict=True):
        written = parameter.alias_info is not None and parameter.alias_info.is_write
        _compare(argument, right, op.close if written else {}, parameter.name)
    _compare(found, returned, op.close, "what is returned")
    for each in placed:
        each.assert_alone()


def _compare(found: Any, wanted: Any, close: dict[torch.dtype, dict[str, float]], what: str) -> None:
    def message(text: str) -> str:
        return f"{what}: {text}"

    pairs = [
        (a, b) for a, b in zip(tree_leaves(found), tree_leaves(wanted), strict=True) if isinstance(b, torch.Tensor)
    ]
    for a, b in pairs:
        if b.dtype.itemsize == 1:
            a, b = _bits(a), _bits(b)
        tolerance = close.get(b.dtype, {"rtol": 0, "atol": 0})
        torch.testing.assert_close(a.cpu(), b, **tolerance, equal_nan=True, msg=message)


class Garbage:
    """Memory that a kernel allocates, amid poison: it holds garbage, which must reach no output."""

    def __init__(self) -> None:
        self.placed: list[Placed] = []

    def given_by(self, empty: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def allocate(*args: Any, **options: Any) -> torch.Tensor:
            tensor = empty(*args, **options)
            if not tensor.numel() or tensor.dtype.itemsize == 1:
                return tensor
            garbage = torch.nan if tensor.dtype.is_floating_point else -(2**30)
            self.placed.append(Placed(tensor.fill_(garbage), tensor.device))
            return self.placed[-1].view

        return allocate


def _with_gaps(shape: Sequence[int]) -> list[int]:
    """Return strides with a gap after every dimension but the last."""
    strides, reach = [1], shape[-1] + 3
    for size in reversed(shape[:-1]):
        strides.insert(0, reach)
        reach *= size + 1
    return strides


def _poison(length: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """NaN, or for integers a small number that is wrong as an index or a length but within range."""
    if dtype.itemsize == 1:
        return torch.full((length,), 0x7F, dtype=torch.uint8, device=device).view(dtype)
    return torch.full((length,), torch.nan if dtype.is_floating_point else 5, dtype=dtype, device=device)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def check_schema(op: Any, arguments: Sequence[Any]) -> None:
    """Raise AssertionError, or what opcheck raises, for an op that contradicts its schema."""
    # opcheck cannot compare tensors of 8-bit floats.
    narrow = any(part.dtype == torch.float8_e4m3fn for part in arguments if isinstance(part, torch.Tensor))
    questions = ("test_faketensor",) if narrow else ("test_schema", "test_faketensor")
    torch.library.opcheck(op, tuple(arguments), test_utils=questions)


def check_fake(op: Any, arguments: Sequence[Any]) -> None:
    """Raise AssertionError if an op's fake returns other shapes or dtypes: opcheck ignores a fake that returns None."""
    with FakeTensorMode() as mode:
        fake = op(*tree_map_only(torch.Tensor, mode.from_tensor, tuple(arguments)))
    assert _described(fake) == _described(op(*arguments))


def _described(result: Any) -> list[tuple[torch.Size, torch.dtype]]:
    tensors = () if result is None else (result,) if isinstance(result, torch.Tensor) else result
    return [(tensor.shape, tensor.dtype) for tensor in tensors]

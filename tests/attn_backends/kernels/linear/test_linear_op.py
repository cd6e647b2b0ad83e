"""What a call of many rows asks of the host: torch's product almost at once, since no graph replays it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from attn_backends.kernels.linear import linear_op, narrow_linear, product_kind
from attn_backends.kernels.linear.fp8_weight import Fp8Weight
from attn_backends.kernels.linear.linear import linear
from attn_backends.kernels.linear.linear_op import LinearArguments
from attn_backends.kernels.linear.narrow_rows import NarrowRows, narrow_rows
from attn_backends.kernels.linear.streamed_tiling import MAX_GATED_ROWS, MAX_NARROW_ROWS

MANY, INPUTS, OUTPUTS = 1 + max(MAX_GATED_ROWS, MAX_NARROW_ROWS), 32, 48

narrow = pytest.mark.xfail(
    torch.__version__.startswith("2.9."), reason="torch 2.9 has one scale for all 8-bit rows on a CPU", strict=True
)


class Called(TorchDispatchMode):
    """Lists the operators that torch runs."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def forbid(monkeypatch: pytest.MonkeyPatch, *places: tuple[Any, str]) -> None:
    for module, name in places:
        monkeypatch.setattr(module, name, lambda *given, name=name: pytest.fail(f"{name} was asked"))


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.mark.parametrize("has_bias", [False, True])
def test_many_rows_in_16_bits_are_one_product_of_torch(has_bias, monkeypatch):
    """Which asks neither for sizes of the device nor for torch's modes."""
    x, weight, bias = draw(MANY, INPUTS), draw(OUTPUTS, INPUTS, seed=1), draw(OUTPUTS, seed=2) if has_bias else None
    forbid(monkeypatch, (product_kind, "room_of"), (product_kind, "may_launch"), (linear_op, "Fp8Weight"))
    with Called() as called:
        out = LinearArguments(x, weight, None, bias).launch()
    assert called.names == ["aten::linear"]
    assert torch.equal(out, torch.nn.functional.linear(x, weight, bias))


@narrow
@pytest.mark.parametrize(("has_bias", "added"), [(False, []), (True, ["aten::add"])])
def test_many_rows_in_8_bits_are_rounded_then_one_product_of_torch(has_bias, added, monkeypatch):
    """Without another op, a weight made for the call, or a size of the device; and as `linear` multiplies them."""
    x, weight, bias = draw(MANY, INPUTS), Fp8Weight.of(draw(OUTPUTS, INPUTS, seed=1)), draw(OUTPUTS, seed=2)
    bias = bias if has_bias else None
    monkeypatch.setattr(narrow_linear, "_has_narrow_products", lambda device: True)
    rounded, wanted = narrow_rows(x), linear(x, weight, bias)
    monkeypatch.setattr(NarrowRows, "launch", lambda rows: rounded)
    forbid(monkeypatch, (product_kind, "room_of"), (narrow_linear, "room_of"), (linear_op, "Fp8Weight"))
    arguments = LinearArguments(x, weight.values, weight.scale, bias)
    with Called() as called:
        out = arguments.launch()
    assert called.names == ["aten::t", "aten::unsqueeze", "aten::unsqueeze", "aten::_scaled_mm", *added]
    assert torch.equal(out, wanted)

"""Sample inputs of ops for tests: every op declares its samples once, next to those of its room."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

CLOSE = {
    torch.float32: {"rtol": 1e-5, "atol": 1e-5},
    torch.float16: {"rtol": 2e-3, "atol": 1e-3},
    torch.bfloat16: {"rtol": 2**-7, "atol": 1e-5},
}
"""Sums in another order; for 16-bit dtypes this can tip a rounding."""
EXACT: dict[torch.dtype, dict[str, float]] = {}

TABLE: dict[str, Op] = {}


@dataclass
class Op:
    """An op's samples; `close`: tolerances by dtype, empty if every bit must agree; `strided`: the arguments that can
    be views with gaps between their rows."""

    name: str
    samples: list[tuple[Any, ...]]
    close: dict[torch.dtype, dict[str, float]]
    strided: Sequence[str]

    @property
    def call(self) -> Any:
        namespace, name = self.name.split("::")
        return getattr(getattr(torch.ops, namespace), name).default


def op(
    name: str, *, close: dict[torch.dtype, dict[str, float]] = EXACT, strided: str = ""
) -> Callable[[Callable[[], Iterable[tuple[Any, ...]]]], None]:
    """Put the function's samples, each a tuple of the op's arguments, into the table."""

    def declare(samples: Callable[[], Iterable[tuple[Any, ...]]]) -> None:
        TABLE[name] = Op(name, [sample for sample in samples() if runs(sample)], close, strided.split())

    return declare


def runs(sample: tuple[Any, ...]) -> bool:
    """Return whether the op's torch implementation accepts the sample: torch 2.9 cannot index fp8 on a CPU."""
    narrow = any(part.dtype == torch.float8_e4m3fn for part in sample if isinstance(part, torch.Tensor))
    return not (narrow and torch.__version__.startswith("2.9."))


def noise(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 2).to(dtype)


def whole(low: int, high: int, *shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed))


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def each(*axes: Iterable[Any]) -> Iterator[tuple[Any, ...]]:
    """Yield the first value of every axis, then each other value of one axis with the first of the others."""
    values = [[*axis] for axis in axes]
    first = tuple(axis[0] for axis in values)
    yield first
    for at, axis in enumerate(values):
        for value in axis[1:]:
            yield (*first[:at], value, *first[at + 1 :])

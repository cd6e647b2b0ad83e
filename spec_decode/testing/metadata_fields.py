"""The fields of a metadata record, and comparisons of two records."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from spec_decode.testing.outcome import expect


def tensors_of(record: Any) -> dict[str, torch.Tensor]:
    """Return the tensor fields of a dataclass, of any shape and dtype, by name."""
    return {name: value for name, value in _fields_of(record).items() if isinstance(value, torch.Tensor)}


def host_fields_of(record: Any) -> dict[str, Any]:
    """Return the other fields, by name."""
    return {name: value for name, value in _fields_of(record).items() if not isinstance(value, torch.Tensor)}


def _fields_of(record: Any) -> dict[str, Any]:
    return {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}


def memory_layouts_of(record: Any) -> dict[str, tuple[Any, ...]]:
    """Return address, shape, strides and dtype of each tensor field, by name."""
    return {
        name: (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
        for name, tensor in tensors_of(record).items()
    }


def moved_since(before: dict[str, tuple[Any, ...]], record: Any) -> list[str]:
    """Return the names of the tensor fields whose address or layout has changed."""
    now = memory_layouts_of(record)
    return [name for name in before if before[name] != now.get(name)]


def copies_of(record: Any) -> dict[str, torch.Tensor]:
    """Copy each tensor field, by name."""
    return {name: tensor.clone() for name, tensor in tensors_of(record).items()}


def changed_since(before: dict[str, torch.Tensor], record: Any) -> list[str]:
    """Return the names of the tensor fields whose content differs from the copies."""
    return [name for name, tensor in tensors_of(record).items() if not torch.equal(tensor, before[name])]


def expect_same_fields(found: Any, fresh: Any, contract: str) -> None:
    """Raise CheckFailure unless every field of `found` has the value of the freshly built one.

    The failure names the first element that differs.
    """
    a, b = tensors_of(found), tensors_of(fresh)
    for name in a:
        if not torch.equal(a[name], b[name]):
            expected, got = _first_difference(name, a[name], b[name])
            expect(False, contract=f"{contract}: field {name} matches the current batch", expected=expected, got=got)
    expect(
        host_fields_of(found) == host_fields_of(fresh),
        contract=f"{contract}: host fields hold for the whole horizon",
        expected=str(host_fields_of(fresh)),
        got=host_fields_of(found),
    )


def _first_difference(name: str, found: torch.Tensor, fresh: torch.Tensor) -> tuple[str, str]:
    """Describe the expected and the found value where two tensors first differ."""
    if found.shape != fresh.shape:
        return f"{name} of shape {list(fresh.shape)}", str(list(found.shape))
    differing = (found != fresh).nonzero()
    where = tuple(differing[0].tolist())
    count = f"{len(differing)} of {found.numel()} elements differ"
    return f"{name}{list(where)} = {fresh[where].item()} as freshly built", f"{found[where].item()} ({count})"

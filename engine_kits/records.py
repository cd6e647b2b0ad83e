"""An engine's metadata in the form the kit compares: a frozen record of its tensors, plus their source objects."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from builders import AttentionBatch


@dataclass(frozen=True, eq=False)
class Inner:
    """The engine's own metadata and its batch. The kit compares only the tensors next to it."""

    metadata: Any
    batch: AttentionBatch

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Inner)

    __hash__ = None  # type: ignore[assignment]


def record_of(tensors: Mapping[str, torch.Tensor], **host: Any) -> Any:
    """Return a frozen dataclass with these tensors and host fields."""
    return _record(tuple(tensors), tuple(host))(*tensors.values(), *host.values())


@cache
def _record(tensors: tuple[str, ...], host: tuple[str, ...]) -> type:
    fields = [*((name, torch.Tensor) for name in tensors), *((name, object) for name in host)]
    return dataclasses.make_dataclass("EngineMetadata", fields, frozen=True)


def tensors_in(metadata: Any, prefix: str = "") -> dict[str, torch.Tensor]:
    """Return the tensors of an engine's dataclass by name; nested names, also in lists, are joined by _."""
    found: dict[str, torch.Tensor] = {}
    for name, value in _parts(metadata, prefix):
        if isinstance(value, torch.Tensor):
            found[name] = value
        elif dataclasses.is_dataclass(value):
            found |= tensors_in(value, f"{name}_")
    return found


def _parts(metadata: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    for field in dataclasses.fields(metadata):
        value, name = getattr(metadata, field.name), prefix + field.name
        if isinstance(value, list | tuple):
            yield from ((f"{name}_{i}", item) for i, item in enumerate(value))
        else:
            yield name, value

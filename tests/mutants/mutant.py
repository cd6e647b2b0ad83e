"""The Mutant record, and decorators that make one of the same name from a broken part of the reference or its
builder."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from attn_backends import AttentionBackend, get
from attn_backends.registry import Backend
from attn_backends.torch_reference import TorchReference
from builders import MetadataBuilder, ReferenceBuilder
from tests.page_lists import PageListBuilder, PageLists


@dataclass(frozen=True)
class Mutant:
    """A broken backend, and the check that must name its defect.

    not_shown: why no running drafter shows the defect to the metadata validator; empty if one does.
    refused: what the drafter itself raises when it captures.
    cases: of the check, those to try, as in `--only`.
    around: wraps the check, and yields what is checked.
    """

    name: str
    killer: str
    backend: Backend
    not_shown: str = ""
    refused: type[Exception] | None = None
    cases: str = "*"
    around: Callable[[Any], AbstractContextManager[Backend | str]] = nullcontext

    @property
    def pattern(self) -> str:
        """The killer with its cases, as `check_backend` takes it."""
        return f"{self.killer}[[]{self.cases}]"


def mutants_of(module: Mapping[str, Any]) -> tuple[Mutant, ...]:
    """Return the mutants that a module defines, in order."""
    return tuple(each for each in module.values() if isinstance(each, Mutant))


def derived(name: str, base: type[MetadataBuilder[Any]] = ReferenceBuilder, **methods: Any) -> type[Any]:
    """Return a builder with these methods that restates its base's claim to advance."""
    support = classmethod(lambda cls, spec, device: base.advance_support(spec, device))
    return type(name, (base,), {"advance_support": support, **methods})


def broken_once_built(
    base: type[Any], broken: Callable[[Any, Any], None], build: Any = None, **methods: Any
) -> type[Any]:
    """Return a builder that builds correctly, and then uses the broken advance."""

    def built(self: Any, batch: Any, *, horizon: int = 0) -> Any:
        self.building = True
        metadata = base.build(self, batch, horizon=horizon)
        self.building = False
        return metadata if build is None else build(self, batch, metadata)

    def advanced(self: Any, metadata: Any) -> None:
        (base.advance if self.building else broken)(self, metadata)

    return derived(broken.__name__, base, build=built, advance=advanced, **methods)


def with_builder(builder: type[MetadataBuilder[Any]], base: str = "torch_reference") -> AttentionBackend:
    """Return the backend `base` with another builder."""
    backend = type(get(base))
    return type(f"{backend.__name__}Mutant", (backend,), {"builder": builder, "name": f"{base}_mutant"})()


def with_forward(change: Callable[..., torch.Tensor]) -> AttentionBackend:
    """Return the reference backend with another forward."""
    return type("ForwardMutant", (TorchReference,), {"forward": change, "name": "forward_mutant"})()


def freeze(base: str, field: str) -> AttentionBackend:
    """Return the backend `base` whose metadata keeps `field` as built: its refresh is removed."""
    original = get(base).builder

    def build(self: Any, batch: Any, *, horizon: int = 0) -> Any:
        self.moving = None
        self.moving = original.build(self, batch, horizon=horizon)
        return replace(self.moving, **{field: getattr(self.moving, field).clone()})

    def advance(self: Any, metadata: Any) -> None:
        original.advance(self, self.moving or metadata)

    return with_builder(derived("Frozen", original, build=build, advance=advance), base)


def values_of(record: Any) -> dict[str, Any]:
    return {field.name: getattr(record, field.name) for field in fields(record)}


def having(name: str, killer: str, **attributes: Any) -> Mutant:
    """Make a mutant of the reference backend with these attributes."""
    return Mutant(name, killer, type(name, (TorchReference,), {"name": name, **attributes})())


def around(killer: str, **options: Any) -> Callable[[Callable[[AttentionBackend], Iterator[Any]]], Mutant]:
    """Make a mutant that breaks not the reference but the surroundings of its check; `does` yields what is checked."""
    return lambda does: Mutant(does.__name__, killer, get("torch_reference"), around=contextmanager(does), **options)


def _decorator(make: Callable[..., Backend]) -> Callable[..., Callable[[Any], Mutant]]:
    """Return a decorator that takes a killer and options: those that are no fields of `Mutant` go to `make`."""

    def of(killer: str, **options: Any) -> Callable[[Any], Mutant]:
        own = {key: options.pop(key) for key in [*options] if key in Mutant.__dataclass_fields__}
        return lambda broken: Mutant(_snake_case(broken.__name__), killer, make(broken, **options), **own)

    return of


def _snake_case(name: str) -> str:
    return re.sub(r"(?<=.)([A-Z])", r"_\1", name).lower()


@_decorator
def backend(broken: type[Backend]) -> Backend:
    """Use this class of backends."""
    return broken()


@_decorator
def builder(broken: type[MetadataBuilder[Any]]) -> AttentionBackend:
    """Use the reference with this class of builders, which restates the reference builder's claim."""
    return with_builder(derived(broken.__name__, broken, advance_support=vars(ReferenceBuilder)["advance_support"]))


@_decorator
def forward(broken: Callable[..., torch.Tensor]) -> AttentionBackend:
    return with_forward(broken)


@_decorator
def attends_by(change: Callable[[Any, Any], Any]) -> AttentionBackend:
    """Attend by the metadata that `change` returns for the correct metadata and the spec."""

    def forward(self: Any, query: Any, cache: Any, metadata: Any, *, spec: Any, sinks: Any = None) -> torch.Tensor:
        return TorchReference.forward(self, query, cache, change(metadata, spec), spec=spec, sinks=sinks)

    return with_forward(forward)


@_decorator
def gives(change: Callable[[torch.Tensor, Any, Any], torch.Tensor]) -> AttentionBackend:
    """Return the output that `change` makes of the correct output, the metadata and the spec."""

    def forward(self: Any, query: Any, cache: Any, metadata: Any, *, spec: Any, sinks: Any = None) -> torch.Tensor:
        out = TorchReference.forward(self, query, cache, metadata, spec=spec, sinks=sinks)
        return change(out, metadata, spec)

    return with_forward(forward)


@_decorator
def build(change: Callable[[Any, Any, Any], Any]) -> AttentionBackend:
    """Use the metadata that `change` makes of the builder, the batch and the correct metadata."""

    def build(self: Any, batch: Any, *, horizon: int = 0) -> Any:
        return change(self, batch, ReferenceBuilder.build(self, batch, horizon=horizon))

    return with_builder(derived(change.__name__, build=build))


@_decorator
def advance(broken: Callable[[Any, Any], None], build: Any = None, **methods: Any) -> AttentionBackend:
    """Break advance after a correct build. build: as in `build`, applied to the correct metadata."""
    return with_builder(broken_once_built(ReferenceBuilder, broken, build, **methods))


@_decorator
def lists_pages(broken: Callable[[Any, Any], torch.Tensor], method: str) -> AttentionBackend:
    """Replace one method of the page lister."""
    name = broken.__name__
    lister = type(name, (PageListBuilder,), {method: broken})
    return type("Lister", (PageLists,), {"name": name, "builder": lister})()

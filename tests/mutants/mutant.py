"""What a mutant is, and how one is made of the reference builder and the reference backend."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from attn_backends import AttentionBackend, get
from attn_backends.torch_reference import TorchReference
from builders import AdvanceSupport, AttentionSpec, MetadataBuilder, ReferenceBuilder
from tests.page_lists import PageListBuilder, PageLists


@dataclass(frozen=True)
class Mutant:
    """A broken backend, and the check that must name its defect.

    not_shown: why no running drafter shows the defect to the metadata validator; empty where one does.
    refused: what the drafter itself raises when it captures.
    cases: of the check, those to try, as in `--only`.
    around: stands around its check, and gives what is checked.
    """

    name: str
    killer: str
    backend: AttentionBackend
    not_shown: str = ""
    refused: type[Exception] | None = None
    cases: str = "*"
    around: Callable[[AttentionBackend], AbstractContextManager[AttentionBackend | str]] = nullcontext

    @property
    def pattern(self) -> str:
        """Its killer on its cases, as `check_backend` takes it."""
        return f"{self.killer}[[]{self.cases}]"


class Restated(ReferenceBuilder):
    """The reference builder with its claim stated again, so that a broken build() still claims to advance."""

    @classmethod
    def advance_support(cls, spec: AttentionSpec, device: torch.device) -> AdvanceSupport:
        return ReferenceBuilder.advance_support(spec, device)


def derived(name: str, **methods: Any) -> type[MetadataBuilder[Any]]:
    """The reference builder with these methods, and its claim stated again."""
    support = classmethod(lambda cls, spec, device: ReferenceBuilder.advance_support(spec, device))
    return type(name, (ReferenceBuilder,), {"advance_support": support, **methods})


def with_builder(builder: type[MetadataBuilder[Any]], base: str = "torch_reference") -> AttentionBackend:
    """The backend `base` with another builder."""
    backend = type(get(base))
    return type(f"{backend.__name__}Mutant", (backend,), {"builder": builder, "name": f"{base}_mutant"})()


def with_forward(change: Callable[..., torch.Tensor]) -> AttentionBackend:
    """The reference backend with another forward."""
    changed = {"forward": change, "name": "forward_mutant"}
    return type("ForwardMutant", (TorchReference,), changed)()


def freeze(base: str, field: str) -> AttentionBackend:
    """The backend `base` whose metadata keeps `field` as it was built: its refresh is removed."""
    original = get(base).builder

    def build(self: Any, batch: Any, *, horizon: int = 0) -> Any:
        self.moving = None
        self.moving = original.build(self, batch, horizon=horizon)
        return replace(self.moving, **{field: getattr(self.moving, field).clone()})

    def advance(self: Any, metadata: Any) -> None:
        original.advance(self, self.moving or metadata)

    support = classmethod(lambda cls, spec, device: original.advance_support(spec, device))
    methods = {"build": build, "advance": advance, "advance_support": support}
    return with_builder(type("Frozen", (original,), methods), base)


def lists_pages(name: str, killer: str, **methods: Any) -> Mutant:
    backend = type("Lister", (PageLists,), {"name": name, "builder": type(name, (PageListBuilder,), methods)})
    return Mutant(name, killer, backend())


def values_of(record: Any) -> dict[str, Any]:
    return {field.name: getattr(record, field.name) for field in fields(record)}


def claims(name: str, killer: str, *, around: Any = nullcontext, cases: str = "*", **attributes: Any) -> Mutant:
    attributes = {"name": name, **attributes}
    return Mutant(name, killer, type(name, (TorchReference,), attributes)(), cases=cases, around=around)


def builder_mutant(
    name: str,
    killer: str,
    *,
    not_shown: str = "",
    refused: type[Exception] | None = None,
    cases: str = "*",
    **methods: Any,
) -> Mutant:
    if "advance" in methods:
        methods["first_build"] = methods.get("build", ReferenceBuilder.build)
        methods["build"] = right_build
        methods["broken_advance"] = methods["advance"]
        methods["advance"] = broken_once_built
    return Mutant(name, killer, with_builder(derived(name, **methods)), not_shown, refused, cases)


def right_build(self: Any, batch: Any, *, horizon: int = 0) -> Any:
    self.building = True
    metadata = self.first_build(batch, horizon=horizon)
    self.building = False
    return metadata


def broken_once_built(self: Any, metadata: Any) -> None:
    advance = ReferenceBuilder.advance if self.building else type(self).broken_advance
    advance(self, metadata)


def attends_by(change: Callable[[Any, Any], Any]) -> Callable[..., torch.Tensor]:
    """The reference forward by the metadata that `change` makes of its own and the spec."""

    def forward(self: Any, query: Any, cache: Any, metadata: Any, *, spec: Any, sinks: Any = None) -> torch.Tensor:
        return TorchReference.forward(self, query, cache, change(metadata, spec), spec=spec, sinks=sinks)

    return forward


def gives(change: Callable[[torch.Tensor, Any, Any], torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The reference forward, whose output `change` makes another, by the metadata and the spec."""

    def forward(self: Any, query: Any, cache: Any, metadata: Any, *, spec: Any, sinks: Any = None) -> torch.Tensor:
        out = TorchReference.forward(self, query, cache, metadata, spec=spec, sinks=sinks)
        return change(out, metadata, spec)

    return forward


def then(change: Callable[[Any, Any], None]) -> Callable[..., None]:
    """The reference advance, and `change` of the builder and its metadata after it."""

    def advance(self: Any, metadata: Any) -> None:
        ReferenceBuilder.advance(self, metadata)
        change(self, metadata)

    return advance


def of_built(change: Callable[[Any, Any, Any], Any]) -> Callable[..., Any]:
    """The reference build, whose metadata `change` makes other, by the builder and the batch."""

    def build(self: Any, batch: Any, *, horizon: int = 0) -> Any:
        return change(self, batch, ReferenceBuilder.build(self, batch, horizon=horizon))

    return build

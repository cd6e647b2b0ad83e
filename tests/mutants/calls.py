"""Backends that are wrong after many calls, in another thread, under other defaults, or next to a sick request, and one
that refuses what it claims."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import torch

from attn_backends.torch_reference import TorchReference
from builders import AttentionSpec, ReferenceBuilder
from tests.mutants.mutant import advance, backend, build, forward, gives

_GO_ON, _SURROUNDINGS = "numerics.forwards_go_on", "numerics.surroundings_change_nothing"


@advance("builder.advances_go_on")
def stops_after_500_advances(self: Any, metadata: Any) -> None:
    self.advances = getattr(self, "advances", 0) + 1
    if self.advances <= 500:
        ReferenceBuilder.advance(self, metadata)


@build("builder.builds_go_on")
def moves_every_3000th_build(self: Any, batch: Any, metadata: Any) -> Any:
    self.builds = getattr(self, "builds", 0) + 1
    return replace(metadata, kv_end=metadata.kv_end.clone()) if self.builds % 3_000 == 0 else metadata


@forward(_GO_ON)
def takes_turns_with_two_buffers(self: Any, query: Any, cache: Any, metadata: Any, **options: Any) -> torch.Tensor:
    out = TorchReference.forward(self, query, cache, metadata, **options)
    self.calls = getattr(self, "calls", 0) + 1
    buffers = self.__dict__.setdefault("buffers", {})
    return buffers.setdefault((self.calls % 2, out.shape), torch.empty_like(out)).copy_(out)


@forward(_GO_ON)
def rounds_every_3000th_output(self: Any, query: Any, cache: Any, metadata: Any, **options: Any) -> torch.Tensor:
    out = TorchReference.forward(self, query, cache, metadata, **options)
    self.calls = getattr(self, "calls", 0) + 1
    return out * (1 + 1e-6) if self.calls % 3_000 == 0 else out


_scratch = threading.local()
_scratch.made = True


@gives(_SURROUNDINGS)
def makes_its_scratch_in_one_thread(out: torch.Tensor, metadata: Any, spec: Any) -> torch.Tensor:
    return out if hasattr(_scratch, "made") else torch.zeros_like(out)


@gives(_SURROUNDINGS)
def counts_in_the_default_dtype(out: torch.Tensor, metadata: Any, spec: Any) -> torch.Tensor:
    ones = torch.ones(out.shape[-1], device=out.device)
    return (out * ones * (1 + 1e-6 * (ones.dtype is torch.float16))).to(out.dtype)


@gives("poison.a_sick_request_stays_alone")
def adds_up_all_rows(out: torch.Tensor, metadata: Any, spec: Any) -> torch.Tensor:
    return out + 0 * out.sum()


@backend("refusal.claims_are_served", not_shown="what a backend accepts is asked before there is a drafter")
class RefusesPagesOf32(TorchReference):
    name = "refuses_pages_of_32"

    def unsupported_reasons(self, spec: AttentionSpec, device: torch.device) -> list[str]:
        return ["the dims do not fit the tile"] if spec.page_size == 32 else []


@backend("refusal.claims_are_served", not_shown="what a backend accepts is asked before there is a drafter")
class RefusesAllSinks(TorchReference):
    name = "refuses_all_sinks"

    def unsupported_reasons(self, spec: AttentionSpec, device: torch.device) -> list[str]:
        return ["sinks need another kernel"] if spec.sinks else []

"""Backends whose claims are wrong, and fused writes that store different numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch

from attn_backends import Accepted, AttentionBackend, Capabilities, Rejected, registry
from attn_backends.kernels.rope import apply_rope, rope_formula
from attn_backends.torch_reference import TorchReference
from builders import AdvanceLevel, AdvanceSupport, AttentionSpec, BatchError, ReferenceBuilder
from tests.factories import register_as
from tests.mutants.mutant import around, backend, build, having, values_of


@contextmanager
def cuda_that_starts() -> Iterator[None]:
    """Inside, initialising CUDA appears to work to a backend; registrations are undone afterwards."""
    started: list[bool] = []
    with (
        mock.patch.object(torch.cuda, "init", lambda: started.append(True)),
        mock.patch.object(torch.cuda, "is_initialized", lambda: bool(started)),
        mock.patch.multiple(registry, _registered={**registry._registered}, _loaded={**registry._loaded}),
        mock.patch.object(registry, "_started_cuda", []),
    ):
        yield


@around("contract.loading_touches_no_cuda")
def starts_cuda_when_loaded(backend: AttentionBackend) -> Iterator[str]:
    def load() -> AttentionBackend:
        torch.cuda.init()
        return backend

    with cuda_that_starts():
        register_as("starts_cuda", load)
        yield "starts_cuda"


@around("contract.cpu_use_touches_no_cuda")
def starts_cuda(backend: AttentionBackend) -> Iterator[AttentionBackend]:
    def forward(*inputs: Any, **options: Any) -> torch.Tensor:
        torch.cuda.init()
        return TorchReference.forward(*inputs, **options)

    with cuda_that_starts():
        yield type("Starter", (TorchReference,), {"forward": forward})()


@around("contract.name_is_the_registered_one")
def called_otherwise(backend: AttentionBackend) -> Iterator[str]:
    with cuda_that_starts():
        register_as("another_name", lambda: backend)
        yield "another_name"


@dataclass(frozen=True, kw_only=True, slots=True)
class _CapabilitiesWithAFunction(Capabilities):
    tune: Callable[..., None] = print


class _KeepsAnInheritedClaim(ReferenceBuilder):
    def __init_subclass__(cls, **kwargs: Any) -> None: ...


class _AdvancesWithoutReason(ReferenceBuilder):
    @classmethod
    def advance_support(cls, spec: AttentionSpec, device: torch.device) -> AdvanceSupport:
        return AdvanceSupport(AdvanceLevel.IN_GRAPH, "")


of_another_contract = having("of_another_contract", "contract.version_matches", contract_version=(2, 0))
capabilities_with_a_function = having(
    "capabilities_with_a_function",
    "contract.capabilities_are_data",
    capabilities=_CapabilitiesWithAFunction(**values_of(TorchReference.capabilities)),
)
advances_without_reason = having(
    "advances_without_reason", "contract.builder_declares_itself", builder=_AdvancesWithoutReason
)
keeps_an_inherited_claim = having(
    "keeps_an_inherited_claim", "contract.overriding_build_drops_the_claim", builder=_KeepsAnInheritedClaim
)


@backend("contract.supports_answers_with_reasons")
class AnswersYesOrNo(TorchReference):
    def supports(self, spec: AttentionSpec, device: torch.device) -> Any:
        return bool(super().supports(spec, device))


@backend("refusal.all_reasons_at_once")
class GivesOneReason(TorchReference):
    def supports(self, spec: AttentionSpec, device: torch.device) -> Accepted | Rejected:
        answer = super().supports(spec, device)
        return Rejected(answer.reasons[:1]) if isinstance(answer, Rejected) else answer


@backend("refusal.bad_writes_never_reach_a_kernel")
class TakesAnyWrite(TorchReference):
    def write_kv(self, key: Any, value: Any, cache: Any, metadata: Any) -> None:
        with suppress(BatchError):
            super().write_kv(key, value, cache, metadata)


@backend("refusal.bad_writes_never_reach_a_kernel")
class ChecksKeysOnly(TorchReference):
    def write_kv(self, key: Any, value: Any, cache: Any, metadata: Any) -> None:
        with suppress(BatchError):
            super().write_kv(key, key[..., : cache.value.shape[-1]], cache, metadata)
            return super().write_kv(key, value, cache, metadata)
        super().write_kv(key, key[..., : cache.value.shape[-1]], cache, metadata)


@build("builder.rounds_keep_no_memory")
def keeps_what_it_builds(self: Any, batch: Any, metadata: Any) -> Any:
    self.kept = [*getattr(self, "kept", []), batch.seq_lens.clone()]
    return metadata


_ROPE_WRITE = "numerics.fused_rope_write_stores_the_same"


@backend(_ROPE_WRITE)
class FusedWithoutKeyRotation(TorchReference):
    def rope_and_write_kv(self, query: Any, key: Any, value: Any, rope: Any, cache: Any, metadata: Any) -> None:
        apply_rope(query, rope)
        self.write_kv(key, value, cache, metadata)


@backend(_ROPE_WRITE)
class FusedWithoutQueryRotation(TorchReference):
    def rope_and_write_kv(self, query: Any, key: Any, value: Any, rope: Any, cache: Any, metadata: Any) -> None:
        self.write_kv(rope_formula(key, rope), value, cache, metadata)


@backend(_ROPE_WRITE)
class FusedWritesPadding(TorchReference):
    def rope_and_write_kv(self, query: Any, key: Any, value: Any, rope: Any, cache: Any, metadata: Any) -> None:
        everywhere = replace(metadata, slot_mapping=metadata.slot_mapping.clamp(min=0))
        super().rope_and_write_kv(query, key, value, rope, cache, everywhere)


@backend("numerics.fused_latent_write_stores_the_same")
class FusedWithAnotherEpsilon(TorchReference):
    def norm_rope_and_write_latent(self, latent: Any, norm_rope: Any, cache: Any, metadata: Any) -> None:
        super().norm_rope_and_write_latent(latent, replace(norm_rope, eps=1.0), cache, metadata)

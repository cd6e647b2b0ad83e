"""Backends whose claims are wrong, and fused writes that store other numbers."""

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
from tests.mutants.mutant import Mutant, attends_by, claims, derived, values_of


def _keeps_what_it_builds(self: Any, batch: Any, *, horizon: int = 0) -> Any:
    self.kept = [*getattr(self, "kept", []), batch.seq_lens.clone()]
    return ReferenceBuilder.build(self, batch, horizon=horizon)


class _KeepsAnInheritedClaim(ReferenceBuilder):
    def __init_subclass__(cls, **kwargs: Any) -> None: ...


class _AdvancesWithoutReason(ReferenceBuilder):
    @classmethod
    def advance_support(cls, spec: AttentionSpec, device: torch.device) -> AdvanceSupport:
        return AdvanceSupport(AdvanceLevel.IN_GRAPH, "")


@attends_by
def _starts_cuda(metadata: Any, spec: Any) -> Any:
    torch.cuda.init()
    return metadata


def _takes_any_write(self: Any, key: Any, value: Any, cache: Any, metadata: Any) -> None:
    with suppress(BatchError):
        TorchReference.write_kv(self, key, value, cache, metadata)


def _answers_yes_or_no(self: Any, spec: AttentionSpec, device: torch.device) -> bool:
    return bool(TorchReference.supports(self, spec, device))


def _gives_one_reason(self: Any, spec: AttentionSpec, device: torch.device) -> Accepted | Rejected:
    answer = TorchReference.supports(self, spec, device)
    return Rejected(answer.reasons[:1]) if isinstance(answer, Rejected) else answer


@dataclass(frozen=True, kw_only=True, slots=True)
class _CapabilitiesWithAFunction(Capabilities):
    tune: Callable[..., None] = print


@contextmanager
def cuda_that_starts() -> Iterator[None]:
    """Inside, initialising CUDA works, as far as a backend can tell; nothing is registered for good."""
    started: list[bool] = []
    with (
        mock.patch.object(torch.cuda, "init", lambda: started.append(True)),
        mock.patch.object(torch.cuda, "is_initialized", lambda: bool(started)),
        mock.patch.multiple(registry, _registered={**registry._registered}, _loaded={**registry._loaded}),
        mock.patch.object(registry, "_started_cuda", []),
    ):
        yield


@contextmanager
def _where_cuda_starts(backend: AttentionBackend) -> Iterator[AttentionBackend]:
    with cuda_that_starts():
        yield backend


@contextmanager
def _starting_when_loaded(backend: AttentionBackend) -> Iterator[str]:
    def load() -> AttentionBackend:
        torch.cuda.init()
        return backend

    with cuda_that_starts():
        register_as(backend.name, load)
        yield backend.name


@contextmanager
def _under_another_name(backend: AttentionBackend) -> Iterator[str]:
    with cuda_that_starts():
        register_as("another_name", lambda: backend)
        yield "another_name"


class _FusedWithoutKeyRotation(TorchReference):
    name = "fused_without_key_rotation"

    def rope_and_write_kv(self, query: Any, key: Any, value: Any, rope: Any, cache: Any, metadata: Any) -> None:
        apply_rope(query, rope)
        self.write_kv(key, value, cache, metadata)


class _FusedWithoutQueryRotation(TorchReference):
    name = "fused_without_query_rotation"

    def rope_and_write_kv(self, query: Any, key: Any, value: Any, rope: Any, cache: Any, metadata: Any) -> None:
        self.write_kv(rope_formula(key, rope), value, cache, metadata)


class _FusedWritesPadding(TorchReference):
    name = "fused_writes_padding"

    def rope_and_write_kv(self, query: Any, key: Any, value: Any, rope: Any, cache: Any, metadata: Any) -> None:
        everywhere = replace(metadata, slot_mapping=metadata.slot_mapping.clamp(min=0))
        super().rope_and_write_kv(query, key, value, rope, cache, everywhere)


class _FusedWithAnotherEpsilon(TorchReference):
    name = "fused_with_another_epsilon"

    def norm_rope_and_write_latent(self, latent: Any, norm_rope: Any, cache: Any, metadata: Any) -> None:
        super().norm_rope_and_write_latent(latent, replace(norm_rope, eps=1.0), cache, metadata)


CLAIM_MUTANTS = (
    claims("of_another_contract", "contract.version_matches", contract_version=(2, 0)),
    claims("called_otherwise", "contract.name_is_the_registered_one", around=_under_another_name),
    claims(
        "capabilities_with_a_function",
        "contract.capabilities_are_data",
        capabilities=_CapabilitiesWithAFunction(**values_of(TorchReference.capabilities)),
    ),
    claims("answers_yes_or_no", "contract.supports_answers_with_reasons", supports=_answers_yes_or_no),
    claims("advances_without_reason", "contract.builder_declares_itself", builder=_AdvancesWithoutReason),
    claims("keeps_an_inherited_claim", "contract.overriding_build_drops_the_claim", builder=_KeepsAnInheritedClaim),
    claims("starts_cuda", "contract.cpu_use_touches_no_cuda", forward=_starts_cuda, around=_where_cuda_starts),
    claims("starts_cuda_when_loaded", "contract.loading_touches_no_cuda", around=_starting_when_loaded),
    claims(
        "keeps_what_it_builds", "builder.rounds_keep_no_memory", builder=derived("Keeps", build=_keeps_what_it_builds)
    ),
    claims("gives_one_reason", "refusal.all_reasons_at_once", supports=_gives_one_reason),
    claims("takes_any_write", "refusal.bad_writes_never_reach_a_kernel", write_kv=_takes_any_write),
)
"""Beside the others: what is wrong with them, no round of a drafter comes to."""

FUSED_WRITE_MUTANTS = (
    Mutant("fused_without_key_rotation", "numerics.fused_rope_write_stores_the_same", _FusedWithoutKeyRotation()),
    Mutant("fused_without_query_rotation", "numerics.fused_rope_write_stores_the_same", _FusedWithoutQueryRotation()),
    Mutant("fused_writes_padding", "numerics.fused_rope_write_stores_the_same", _FusedWritesPadding()),
    Mutant("fused_with_another_epsilon", "numerics.fused_latent_write_stores_the_same", _FusedWithAnotherEpsilon()),
)
"""Beside the others: metadata is right, so that no validation of a running drafter shows them."""

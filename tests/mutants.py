"""Backends broken in one way each. The kit is good only if a named check kills every one of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from attn_backends import AttentionBackend, get
from attn_backends.kernels.rope import apply_rope, rope_formula
from attn_backends.torch_reference import TorchReference
from builders import AdvanceSupport, AttentionSpec, MetadataBuilder, ReferenceBuilder
from spec_decode.graphs import CaptureError
from tests.page_lists import PageListBuilder, PageLists


@dataclass(frozen=True)
class Mutant:
    """A broken backend, and the check that must name its defect.

    not_shown: why no running drafter shows the defect to the metadata validator; empty where one does.
    refused: what the drafter itself raises when it captures.
    """

    name: str
    killer: str
    backend: AttentionBackend
    not_shown: str = ""
    refused: type[Exception] | None = None


class _Restated(ReferenceBuilder):
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
    return type("ForwardMutant", (TorchReference,), {"forward": change, "name": "forward_mutant"})()


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


def _stale_lengths(self: Any, metadata: Any) -> None:
    kept = metadata.kv_end.clone()
    ReferenceBuilder.advance(self, metadata)
    metadata.kv_end.copy_(torch.minimum(kept, metadata.kv_end))


def _stale_window(self: Any, metadata: Any) -> None:
    kept = metadata.kv_start.clone()
    ReferenceBuilder.advance(self, metadata)
    metadata.kv_start.copy_(torch.where(metadata.kv_end > 0, kept, 0))


def _increments_itself(self: Any, metadata: Any) -> None:
    before = metadata.kv_end.clone()
    ReferenceBuilder.advance(self, metadata)
    metadata.kv_end.copy_(torch.where(before > 0, before + 1, 0))


def _reallocates(self: Any, metadata: Any) -> None:
    ReferenceBuilder.advance(self, metadata)
    object.__setattr__(metadata, "kv_end", metadata.kv_end.clone())


def _reads_the_host(self: Any, metadata: Any) -> None:
    if int(metadata.seq_lens.max()) > 0:
        ReferenceBuilder.advance(self, metadata)


def _off_by_one_at_a_page_edge(self: Any, batch: Any, *, horizon: int = 0) -> Any:
    self.slots = torch.empty_like(batch.slot_mapping) if not hasattr(self, "slots") else self.slots
    return replace(ReferenceBuilder.build(self, batch, horizon=horizon), slot_mapping=_edge(self, batch))


def _edge(self: Any, batch: Any) -> torch.Tensor:
    slots = batch.slot_mapping
    at_edge = (slots % self.spec.page_size == self.spec.page_size - 1) & (slots >= 0)
    return torch.where(at_edge, slots - 1, slots)


def _padding_writes_slot_0(self: Any, batch: Any, *, horizon: int = 0) -> Any:
    metadata = ReferenceBuilder.build(self, batch, horizon=horizon)
    return replace(metadata, slot_mapping=batch.slot_mapping.clamp(min=0))


def _bakes_max_seq_len(self: Any, batch: Any, *, horizon: int = 0) -> Any:
    return ReferenceBuilder.build(self, replace(batch, max_seq_len=max(batch.host_seq_lens)), horizon=horizon)


def _writes_the_batch(self: Any, batch: Any, *, horizon: int = 0) -> Any:
    batch.seq_lens.clamp_(min=1)
    return ReferenceBuilder.build(self, batch, horizon=horizon)


def _builds_elsewhere(self: Any, batch: Any, *, horizon: int = 0) -> Any:
    metadata = ReferenceBuilder.build(self, batch, horizon=horizon)
    self.kept = [*getattr(self, "kept", []), metadata.kv_end.clone()]
    return replace(metadata, kv_end=self.kept[-1])


def _top_left_causal(self: Any, query: Any, cache: Any, metadata: Any, *, spec: Any, sinks: Any = None) -> torch.Tensor:
    first = metadata.query_start_loc[metadata.token_to_req].int()
    token = torch.arange(metadata.num_tokens, dtype=torch.int32, device=first.device)
    end = torch.minimum(token - first + 1, metadata.kv_end)
    return TorchReference.forward(self, query, cache, replace(metadata, kv_end=end), spec=spec, sinks=sinks)


def _interleaved_groups(
    self: Any, query: Any, cache: Any, metadata: Any, *, spec: Any, sinks: Any = None
) -> torch.Tensor:
    order = torch.arange(spec.num_q_heads).view(spec.group_size, spec.num_kv_heads).t().flatten()
    out = TorchReference.forward(self, query[:, order], cache, metadata, spec=spec, sinks=sinks)
    return out[:, order.argsort()]


def _forgets_sinks(self: Any, query: Any, cache: Any, metadata: Any, *, spec: Any, sinks: Any = None) -> torch.Tensor:
    bare = replace(spec, sinks=False)
    return TorchReference.forward(self, query, cache, metadata, spec=bare, sinks=None)


def _reads_a_token_too_many(
    self: Any, query: Any, cache: Any, metadata: Any, *, spec: Any, sinks: Any = None
) -> torch.Tensor:
    past = replace(metadata, kv_end=torch.where(metadata.kv_end > 0, metadata.kv_end + 1, 0))
    return TorchReference.forward(self, query, cache, past, spec=spec, sinks=sinks)


def _uses_scratch_unwritten(
    self: Any, query: Any, cache: Any, metadata: Any, *, spec: Any, sinks: Any = None
) -> torch.Tensor:
    out = TorchReference.forward(self, query, cache, metadata, spec=spec, sinks=sinks)
    return out + 0 * torch.empty_like(out)


def _checks_nothing(self: Any, query: Any, cache: Any, metadata: Any, *, spec: Any, sinks: Any = None) -> torch.Tensor:
    return query.new_zeros(query.shape[0], spec.num_q_heads, spec.out_dim)


class _FusedWithoutKeyRotation(TorchReference):
    name = "fused_without_key_rotation"
    contract_version = (1, 1)

    def rope_and_write_kv(self, query: Any, key: Any, value: Any, rope: Any, cache: Any, metadata: Any) -> None:
        apply_rope(query, rope)
        self.write_kv(key, value, cache, metadata)


class _FusedWithoutQueryRotation(TorchReference):
    name = "fused_without_query_rotation"
    contract_version = (1, 1)

    def rope_and_write_kv(self, query: Any, key: Any, value: Any, rope: Any, cache: Any, metadata: Any) -> None:
        self.write_kv(rope_formula(key, rope), value, cache, metadata)


class _FusedWritesPadding(TorchReference):
    name = "fused_writes_padding"
    contract_version = (1, 1)

    def rope_and_write_kv(self, query: Any, key: Any, value: Any, rope: Any, cache: Any, metadata: Any) -> None:
        everywhere = replace(metadata, slot_mapping=metadata.slot_mapping.clamp(min=0))
        super().rope_and_write_kv(query, key, value, rope, cache, everywhere)


class _FusedWithAnotherEpsilon(TorchReference):
    name = "fused_with_another_epsilon"
    contract_version = (1, 1)

    def norm_rope_and_write_latent(self, latent: Any, norm_rope: Any, cache: Any, metadata: Any) -> None:
        super().norm_rope_and_write_latent(latent, replace(norm_rope, eps=1.0), cache, metadata)


class _AcceptsEverything(TorchReference):
    name = "accepts_everything"

    def supports(self, spec: AttentionSpec, device: torch.device) -> Any:
        from attn_backends import Accepted

        return Accepted()


class _UndeclaredStepField(_Restated):
    step_fields = ("seq_lens", "positions", "slot_mapping", "kv_start")


class _SharedBuffers(_Restated):
    _pool: Any = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        type(self)._pool = self._kv_end if type(self)._pool is None else type(self)._pool
        self._kv_end = type(self)._pool


def _pages_of_16(self: Any, metadata: Any) -> torch.Tensor:
    return (metadata.seq_lens + 15) // 16


def _counts_only_grow(self: Any, metadata: Any) -> torch.Tensor:
    return torch.maximum(metadata.page_counts, PageListBuilder.counts(self, metadata))


def _leaves_the_tail(self: Any, metadata: Any) -> torch.Tensor:
    listed = torch.arange(len(metadata.page_list)) < metadata.page_counts.sum()
    return torch.where(listed, PageListBuilder.pages(self, metadata), metadata.page_list)


def _lists_pages(name: str, killer: str, **methods: Any) -> Mutant:
    backend = type("Lister", (PageLists,), {"name": name, "builder": type(name, (PageListBuilder,), methods)})
    return Mutant(name, killer, backend())


def _builder_mutant(
    name: str, killer: str, *, not_shown: str = "", refused: type[Exception] | None = None, **methods: Any
) -> Mutant:
    if "advance" in methods:
        methods["build"] = _right_build
        methods["broken_advance"] = methods["advance"]
        methods["advance"] = _broken_once_built
    return Mutant(name, killer, with_builder(derived(name, **methods)), not_shown, refused)


def _right_build(self: Any, batch: Any, *, horizon: int = 0) -> Any:
    self.building = True
    metadata = ReferenceBuilder.build(self, batch, horizon=horizon)
    self.building = False
    return metadata


def _broken_once_built(self: Any, metadata: Any) -> None:
    advance = ReferenceBuilder.advance if self.building else type(self).broken_advance
    advance(self, metadata)


MUTANTS = (
    _builder_mutant("stale_seq_lens", "builder.advance_means_a_rebuild", advance=_stale_lengths),
    _builder_mutant("window_not_moved", "builder.advance_means_a_rebuild", advance=_stale_window),
    _builder_mutant(
        "increments_its_own_contents", "builder.advance_refreshes_another_batch", advance=_increments_itself
    ),
    _builder_mutant(
        "reallocates_in_advance",
        "builder.advance_keeps_addresses",
        advance=_reallocates,
        not_shown="an advance runs while it is captured, never after: its new memory is the graph's own",
    ),
    _builder_mutant(
        "reads_the_host_in_advance",
        "builder.advance_is_device_work",
        advance=_reads_the_host,
        refused=CaptureError,
    ),
    _builder_mutant("off_by_one_slot_at_a_page_edge", "numerics.attention_is_right", build=_off_by_one_at_a_page_edge),
    _builder_mutant("padding_writes_slot_0", "builder.padding_stays_inert", build=_padding_writes_slot_0),
    _builder_mutant("bakes_max_seq_len", "builder.advance_attends_right", build=_bakes_max_seq_len, refused=TypeError),
    _builder_mutant("writes_into_the_batch", "builder.build_leaves_the_batch_alone", build=_writes_the_batch),
    _builder_mutant(
        "builds_elsewhere",
        "builder.build_reuses_its_addresses",
        build=_builds_elsewhere,
        not_shown="a group that advances in place is built before the capture, never after",
    ),
    _lists_pages("page_counts_only_grow", "builder.advance_refreshes_another_batch", counts=_counts_only_grow),
    _lists_pages("tail_of_a_list_stays", "builder.advance_refreshes_another_batch", pages=_leaves_the_tail),
    Mutant(
        "undeclared_step_field",
        "builder.step_fields_are_complete",
        with_builder(_UndeclaredStepField),
        not_shown="what a builder declares of its fields, no kernel reads",
    ),
    Mutant("builders_share_buffers", "contract.builders_share_no_state", with_builder(_SharedBuffers)),
    Mutant("top_left_causal", "numerics.attention_is_right", with_forward(_top_left_causal)),
    Mutant("gqa_interleaved", "numerics.attention_is_right", with_forward(_interleaved_groups)),
    Mutant(
        "forgets_sinks",
        "numerics.attention_is_right",
        with_forward(_forgets_sinks),
        not_shown="the draft of a backend of keys and values has no sinks",
    ),
    Mutant("reads_past_the_end", "poison.stale_table_entries_are_not_read", with_forward(_reads_a_token_too_many)),
    Mutant(
        "reads_unwritten_scratch",
        "poison.uninitialised_memory_is_not_read",
        with_forward(_uses_scratch_unwritten),
    ),
    Mutant("checks_no_input", "refusal.bad_tensors_never_reach_a_kernel", with_forward(_checks_nothing)),
    Mutant(
        "accepts_everything",
        "refusal.unclaimed_is_refused",
        _AcceptsEverything(),
        not_shown="what a backend accepts is asked before there is a drafter",
    ),
)

ONE_PAGE_SIZE = _lists_pages("pages_have_16_tokens", "builder.advance_means_a_rebuild", counts=_pages_of_16)
"""Beside the others: it is right in pages of 16 tokens, which a test's drafter has unless it asks for others."""

FUSED_WRITE_MUTANTS = (
    Mutant("fused_without_key_rotation", "numerics.fused_rope_write_stores_the_same", _FusedWithoutKeyRotation()),
    Mutant("fused_without_query_rotation", "numerics.fused_rope_write_stores_the_same", _FusedWithoutQueryRotation()),
    Mutant("fused_writes_padding", "numerics.fused_rope_write_stores_the_same", _FusedWritesPadding()),
    Mutant("fused_with_another_epsilon", "numerics.fused_latent_write_stores_the_same", _FusedWithAnotherEpsilon()),
)
"""Beside the others: metadata is right, so that no validation of a running drafter shows them."""

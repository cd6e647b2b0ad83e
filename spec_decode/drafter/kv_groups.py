"""The KV groups of a model: layers that share a backend, a spec and a block table, each with its cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from attn_backends import AttentionBackend, KVCache, NoBackend, Rejected
from attn_backends.kernels.rope import Rotation, rotate_both
from attn_backends.kernels.rope_and_write_kv import rotate_and_write_kv
from attn_backends.kernels.write_latent import KvANormRope
from builders import AttentionSpec, BatchBuffers, MetadataBuilder, RequestTables
from builders.errors import require
from spec_decode.drafter.plan import GroupFacts
from spec_decode.models.base import Attend, DraftModel, LayerGroup, TargetModel

BackendChoice: TypeAlias = AttentionBackend | Mapping[str, AttentionBackend] | Callable[[LayerGroup], AttentionBackend]
"""One backend for all of a model's groups, one for each group's name, or a function that chooses."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KVGroup:
    """One group: group i of a model uses block table i of its RequestTables."""

    name: str
    backend: AttentionBackend
    spec: AttentionSpec
    caches: dict[int, KVCache]
    """Layer index -> cache."""

    @property
    def num_pages(self) -> int:
        return next(iter(self.caches.values())).num_pages

    def facts(self, device: torch.device) -> GroupFacts:
        """What the strategy's choice needs to know."""
        builder = self.backend.builder
        return GroupFacts(
            name=self.name,
            backend=self.backend.name,
            graph_support=builder.graph_support,
            advance=builder.advance_support(self.spec, device),
            host_lengths=builder.host_lengths,
            build_per_round=builder.build_per_round,
        )

    def make_builder(
        self, device: torch.device, *, max_reqs: int, max_tokens: int, max_seq_len: int
    ) -> MetadataBuilder[Any]:
        """A builder for one batch shape: its persistent buffers must not serve two."""
        return self.backend.builder(
            self.spec, device, max_reqs=max_reqs, max_tokens=max_tokens, max_seq_len=max_seq_len
        )


def make_group(
    name: str,
    backend: AttentionBackend,
    spec: AttentionSpec,
    layers: Sequence[int],
    *,
    num_pages: int,
    device: torch.device,
) -> KVGroup:
    """Allocate a group's caches. Raises NoBackend, before any allocation, when the backend refuses the spec."""
    verdict = backend.supports(spec, device)
    if isinstance(verdict, Rejected):
        raise NoBackend(
            f"group {name} needs a backend for [{spec.describe()}] on {device.type}, {backend.name} refuses: "
            f"{'; '.join(verdict.reasons)}. Nothing was allocated; choose another backend."
        )
    caches = {layer: backend.allocate_kv(spec, num_pages, device) for layer in layers}
    for cache in caches.values():
        cache.key.zero_()
        cache.value.zero_()
    return KVGroup(name=name, backend=backend, spec=spec, caches=caches)


def make_groups(
    name: str,
    model: TargetModel | DraftModel,
    choice: BackendChoice,
    page_size: int,
    num_pages: int,
    device: torch.device,
) -> list[KVGroup]:
    """Groups with caches of num_pages pages, in the model's order, called `name`, and by their own names if several.

    Raises BatchError for a mapping without one of the groups, and NoBackend for a backend that refuses one.
    """
    layer_groups = model.layer_groups(page_size)
    backends = [_backend(name, group, choice) for group in layer_groups]
    return [
        make_group(
            name if len(layer_groups) == 1 else f"{name} {group.name}",
            backend,
            group.spec,
            group.layers,
            num_pages=num_pages,
            device=device,
        )
        for group, backend in zip(layer_groups, backends, strict=True)
    ]


def _backend(name: str, group: LayerGroup, choice: BackendChoice) -> AttentionBackend:
    if isinstance(choice, AttentionBackend):
        return choice
    if not isinstance(choice, Mapping):
        return choice(group)
    require(
        group.name in choice,
        f"every KV group of the {name} needs a backend, {group.name!r} has none among {sorted(choice)}; nothing was "
        "allocated. Add it, or pass one backend for all.",
    )
    return choice[group.name]


def attend_with(groups: Sequence[KVGroup], metadata: Sequence[Any]) -> Attend:
    """The attention that a model calls, over these groups with this metadata (one per group)."""
    by_layer = {layer: index for index, group in enumerate(groups) for layer in group.caches}

    def attend(
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        norm: KvANormRope | None = None,
        sinks: torch.Tensor | None = None,
        rotation: Rotation | None = None,
    ) -> torch.Tensor:
        index = by_layer[layer]
        group, cache = groups[index], groups[index].caches[layer]
        if norm is None:
            query = _store(group, cache, metadata[index], query, key, value, rotation)
        else:
            assert rotation is None, "a latent is turned as it is normed: see Attend"
            group.backend.write_latent(key[:, 0].to(group.spec.new_kv_dtype), norm, cache, metadata[index])
        return group.backend.forward(query, cache, metadata[index], spec=group.spec, sinks=sinks)

    return attend


def _store(
    group: KVGroup,
    cache: KVCache,
    metadata: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rotation: Rotation | None,
) -> torch.Tensor:
    """Turn query and key, if there is a rotation, and store key and value; returns the query.

    As one kernel where storing is what the base class does with keys as they come; a backend that stores in a way of
    its own gets them turned.
    """
    dtype, write_kv = group.spec.new_kv_dtype, group.backend.write_kv
    as_the_base_class = getattr(write_kv, "__func__", None) is AttentionBackend.write_kv and not cache.latent
    if rotation is not None and as_the_base_class and key.dtype == dtype and not query.requires_grad:
        rotate_and_write_kv(query, key, value, rotation, cache.key, cache.value, metadata.slot_mapping)
        return query
    query, key = rotate_both(query, key, rotation)
    write_kv(key.to(dtype), value.to(dtype), cache, metadata)
    return query


def build_ragged(
    groups: Sequence[KVGroup], tables: RequestTables, query_lens: Sequence[int], seq_lens: Sequence[int]
) -> tuple[BatchBuffers, list[Any]]:
    """Eager batch state and each group's metadata for lengths the host knows: r's last query_lens[r] of seq_lens[r]."""
    batch = BatchBuffers(tables, max_tokens=sum(query_lens))
    num_reqs, num_tokens = batch.load(query_lens, seq_lens)
    metadata = []
    for index, group in enumerate(groups):
        builder = group.make_builder(
            tables.device, max_reqs=tables.max_reqs, max_tokens=num_tokens, max_seq_len=tables.max_seq_len
        )
        view = batch.view(
            index,
            num_reqs=num_reqs,
            num_tokens=num_tokens,
            max_query_len=max(query_lens),
            max_seq_len=max(seq_lens),
            uniform=len(set(query_lens)) == 1,
            host_seq_lens=seq_lens,
            host_seq_lens_exact=True,
        )
        metadata.append(builder.build(view))
    return batch, metadata

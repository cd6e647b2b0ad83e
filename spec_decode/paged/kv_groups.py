"""The groups of a model: layers that share a backend, a spec and a block table, each with its own cache."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import torch

from attn_backends import AttentionBackend, KVCache, KVScales, NoBackend, Rejected, StateBackend, select
from attn_backends.state_cache import bytes_of_slot
from builders import (
    AttentionKind,
    AttentionSpec,
    BatchBuffers,
    BatchError,
    MetadataBuilder,
    RequestTables,
    StateBuilder,
    StateSpec,
)
from builders.errors import require
from spec_decode.model_api import DraftModel, LayerGroup, TargetModel, batch_invariance
from spec_decode.paged.metadata_plan import GroupFacts
from spec_decode.paged.state_group import StateGroup

BackendChoice: TypeAlias = (
    AttentionBackend | Mapping[str, AttentionBackend | StateBackend] | Callable[[LayerGroup], AttentionBackend]
)
"""One backend for all of a model's KV groups, a mapping from group name to backend, or a function of the group. A state
group that no mapping names gets the first backend that supports it."""
JOURNAL_STEPS = 2
"""Steps whose tokens a journal holds. With one, every step writes its checkpoints; more take memory."""


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
        return min(cache.num_pages for cache in self.caches.values())

    def facts(self, device: torch.device) -> GroupFacts:
        """Return what the choice of a strategy depends on."""
        return GroupFacts.of(self.name, self.backend, self.spec, device)

    def make_builder(self, tables: RequestTables, max_tokens: int) -> MetadataBuilder[Any]:
        """Make a builder for one batch shape over these tables; two shapes must not share its persistent buffers."""
        return self.backend.builder(
            self.spec, tables.device, max_reqs=tables.max_reqs, max_tokens=max_tokens, max_seq_len=tables.max_seq_len
        )


def make_group(
    name: str,
    backend: AttentionBackend,
    spec: AttentionSpec,
    layers: Sequence[int],
    *,
    num_pages: int,
    device: torch.device,
    kv_scales: Mapping[int, tuple[float, float]] | None = None,
) -> KVGroup:
    """Allocate a group's caches. kv_scales: as of a model, read only if the caches have scales.

    Raises, before any allocation, NoBackend if the backend rejects the spec, and CachesTooLarge for caches larger than
    the device's total memory.
    """
    answer = backend.supports(spec, device)
    if isinstance(answer, Rejected):
        raise NoBackend(
            f"group {name} needs a backend for [{spec.describe()}] on {device.type}, but {backend.name} rejects it: "
            f"{'; '.join(answer.reasons)}. Nothing was allocated; choose another backend."
        )
    width = spec.head_dim if spec.kind is AttentionKind.MLA else spec.head_dim + spec.out_dim
    needed = len(layers) * num_pages * spec.page_size * spec.num_kv_heads * width * spec.cache_dtype.itemsize
    _require_memory(name, f"{num_pages} pages of {spec.page_size} tokens in {len(layers)} layers", needed, device)
    caches = {
        layer: replace(backend.allocate_kv(spec, num_pages, device), scales=_scales(spec, found, device))
        for layer, found in ((layer, (kv_scales or {}).get(layer, (1.0, 1.0))) for layer in layers)
    }
    for cache in caches.values():
        _zero(cache.key)
        _zero(cache.value)
    return KVGroup(name=name, backend=backend, spec=spec, caches=caches)


def _scales(spec: AttentionSpec, of_layer: tuple[float, float], device: torch.device) -> KVScales | None:
    key, value = ([scale] * spec.num_kv_scales for scale in of_layer)
    return KVScales.of(key, value, device) if key else None


class CachesTooLarge(BatchError):
    """Caches larger than the device's memory. problem: the message without its remedy."""

    def __init__(self, problem: str) -> None:
        super().__init__(f"{problem}. Use fewer or smaller pages, or fewer requests at once.")
        self.problem = problem


def _zero(cache: torch.Tensor) -> None:
    """Fill the cache with zeros. New memory of a CPU is zero and takes up no space until it is written, so that pages
    which no text comes to need never take any; a read leaves it so."""
    # As bytes: of other dtypes, torch would make a copy in bool first.
    fresh = cache.device.type == "cpu" and not bool(cache.view(torch.uint8).any())
    if not fresh:
        cache.zero_()


def _require_memory(name: str, what: str, needed: int, device: torch.device) -> None:
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
    else:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > total:
        raise CachesTooLarge(
            f"group {name} needs {what}, {needed / 2**30:.1f} GiB, but {device} has {total / 2**30:.1f}"
        )


KV_CACHE_DTYPES: dict[str, torch.dtype | None] = {
    "auto": None,
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
}
"""vLLM's names for the dtype of a KV cache -> that dtype; None for the model's own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupOptions:
    """What an engine asks of all KV groups of a model.

    kv_dtype         of the caches; None is the model's own
    batch_invariant  see AttentionSpec
    tree             the query tokens are trees; ignored for a draft that proposes all its tokens at once
    """

    page_size: int
    kv_dtype: torch.dtype | None = None
    batch_invariant: bool = False
    tree: bool = False


def layer_groups_of(model: TargetModel | DraftModel, options: GroupOptions) -> list[LayerGroup]:
    """Return the model's layer groups with these options in their specs."""
    tree = options.tree and not (isinstance(model, DraftModel) and model.drafts_at_once)
    changes: dict[str, Any] = {"batch_invariant": options.batch_invariant, "tree": tree}
    if options.kv_dtype is not None:
        changes["kv_dtype"] = options.kv_dtype
    groups = model.layer_groups(options.page_size)
    return [replace(group, spec=replace(group.spec, **changes)) for group in groups]


def make_groups(
    name: str,
    model: TargetModel | DraftModel,
    choice: BackendChoice,
    options: GroupOptions,
    num_pages: int,
    device: torch.device,
) -> list[KVGroup]:
    """Allocate groups with num_pages pages per cache, in the model's order, named `name`, plus own names if several.

    Raises BatchError for a mapping that lacks a group, and NoBackend if a backend rejects one.
    """
    layer_groups = layer_groups_of(model, options)
    backends = [_backend(name, group, choice) for group in layer_groups]
    names = [name if len(layer_groups) == 1 else f"{name} {group.name}" for group in layer_groups]
    return [
        make_group(
            *(group_name, backend, group.spec, group.layers),
            num_pages=num_pages,
            device=device,
            kv_scales=model.kv_scales,
        )
        for group_name, group, backend in zip(names, layer_groups, backends, strict=True)
    ]


def state_groups_of(model: TargetModel, query_len: int, *, tree: bool = False) -> list[LayerGroup[StateSpec]]:
    """Return the model's state groups for steps of query_len tokens, with tree set in their specs."""
    groups = model.state_groups(JOURNAL_STEPS * query_len)
    return [replace(group, spec=replace(group.spec, tree=tree)) for group in groups]


def make_state_groups(
    name: str,
    layer_groups: Sequence[LayerGroup[StateSpec]],
    choice: BackendChoice,
    num_slots: int,
    device: torch.device,
) -> list[StateGroup]:
    """Allocate groups, named as `make_groups` names several, with num_slots slots. Raises BatchError for a backend that
    does not support its group, NoBackend if none does, and CachesTooLarge."""
    made = []
    for group in layer_groups:
        backend, count = _state_backend(name, group, choice, device), len(group.layers)
        needed = count * num_slots * bytes_of_slot(group.spec)
        _require_memory(f"{name} {group.name}", f"the states of {num_slots} requests in {count} layers", needed, device)
        states = backend.allocate_state(group.spec, count, num_slots, device)
        caches = dict(zip(group.layers, states, strict=True))
        made.append(StateGroup(name=f"{name} {group.name}", backend=backend, spec=group.spec, caches=caches))
    return made


def _state_backend(
    name: str, group: LayerGroup[StateSpec], choice: BackendChoice, device: torch.device
) -> StateBackend:
    if not isinstance(choice, Mapping) or group.name not in choice:
        return select(group.spec, device).backend
    backend = choice[group.name]
    require(
        isinstance(backend, StateBackend),
        f"state group {group.name!r} of the {name} has the backend {backend!r:.200}. Pass "
        "attn_backends.get_state(NAME), or leave the group out.",
    )
    assert isinstance(backend, StateBackend)
    return backend


def _backend(name: str, group: LayerGroup, choice: BackendChoice) -> AttentionBackend:
    if isinstance(choice, AttentionBackend):
        return choice
    if not isinstance(choice, Mapping):
        require(
            callable(choice),
            f"the backend of the {name} is {choice!r:.200}. Pass attn_backends.get(NAME), or a mapping from group name "
            "to backend.",
        )
        return choice(group)
    require(
        group.name in choice,
        f"KV group {group.name!r} of the {name} has no backend among {sorted(choice)}. Add one, or pass one "
        "backend for all groups.",
    )
    backend = choice[group.name]
    require(
        isinstance(backend, AttentionBackend),
        f"KV group {group.name!r} of the {name} has the backend {backend!r:.200}. Pass attn_backends.get(NAME).",
    )
    assert isinstance(backend, AttentionBackend)
    return backend


def products_of(
    model: TargetModel | DraftModel, groups: Sequence[KVGroup | StateGroup]
) -> Callable[[], AbstractContextManager[None]]:
    """Return a factory for the context to run the model in: its products are batch invariant if the KV groups' specs
    are.

    Raises BatchError if only some groups are batch invariant, or if the model cannot be.
    """
    specs = [group.spec for group in groups if isinstance(group, KVGroup)]
    requested = {spec.batch_invariant for spec in specs}
    require(
        requested == {False} or (requested == {True} and model.batch_invariant),
        "batch invariance must hold for all groups or none, and for the model's products with them, got "
        f"{[spec.batch_invariant for spec in specs]} and {type(model).__name__}, which "
        f"{'can' if model.batch_invariant else 'cannot'}; its tokens would still depend on the batch. "
        "Use a model built from this library's layers, or omit batch_invariant.",
    )
    return partial(batch_invariance, True in requested)


def check_pools(groups: Sequence[KVGroup | StateGroup], tables: RequestTables) -> None:
    """Raise BatchError for tables that can name pages beyond a group's caches."""
    for group, pages in zip(groups, tables.num_pages, strict=True):
        require(
            pages <= group.num_pages,
            f"the tables of group {group.name} can name {pages} pages, but its caches have {group.num_pages}; a kernel "
            "would read and write outside them. Use one count.",
        )


def build_ragged(
    groups: Sequence[KVGroup | StateGroup],
    tables: RequestTables,
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
) -> tuple[BatchBuffers, list[Any]]:
    """Build eager batch state and group metadata for host-known lengths: request r's last query_lens[r] of seq_lens[r].
    The tokens are certain, so states absorb them.

    Raises BatchError, before any launch, for lengths beyond the requests' limits, and as `check_pools`.
    """
    check_pools(groups, tables)
    batch = BatchBuffers(tables, max_tokens=sum(query_lens))
    num_reqs, num_tokens = batch.load(query_lens, seq_lens)
    metadata = []
    for index, group in enumerate(groups):
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
        builder = group.make_builder(tables, num_tokens)
        certain = {"absorb": True} if isinstance(builder, StateBuilder) else {}
        metadata.append(builder.build(view, **certain))
    return batch, metadata

"""Backends broken in one way each. The kit is good only if a named check kills every one of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, fields, make_dataclass, replace
from typing import Any
from unittest import mock

import torch

from attn_backends import Accepted, AttentionBackend, Capabilities, Feature, KVCache, Rejected, get, registry
from attn_backends.kernels.rope import apply_rope, rope_formula
from attn_backends.kernels.softmax import softmax_with_sinks
from attn_backends.merged_trees import merge_tree
from attn_backends.torch_reference import TorchReference
from attn_backends.triton_paged import TritonPaged
from builders import (
    AdvanceLevel,
    AdvanceSupport,
    AttentionBatch,
    AttentionSpec,
    BatchError,
    FlashAttn3Builder,
    FlashAttn3Metadata,
    MetadataBuilder,
    ReferenceBuilder,
    ReferenceMetadata,
)
from spec_decode.graphs import CaptureError
from spec_decode.testing.poison import bits
from tests import flash_attn3_stand_in
from tests.foreseen import Foreseen, ForeseenBuilder
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


_NO_BLOCK = "the validator drafts no blocks"


def _blocks_are_causal(self: Any, query: Any, cache: Any, metadata: Any, **options: Any) -> torch.Tensor:
    own = torch.where(metadata.kv_end > 0, metadata.positions + 1, 0).int()
    return TorchReference.forward(self, query, cache, replace(metadata, kv_end=own), **options)


def _windows_end_at_a_blocks_own_tokens(self: Any, metadata: Any) -> None:
    ReferenceBuilder.advance(self, metadata)
    if not self.spec.causal and self.spec.sliding_window:
        metadata.kv_start.copy_((metadata.kv_end - self.spec.sliding_window).clamp_(min=0))


def _leaves_a_blocks_end(self: Any, metadata: Any) -> None:
    end = metadata.kv_end.clone()
    ReferenceBuilder.advance(self, metadata)
    if not self.spec.causal:
        metadata.kv_end.copy_(end)


_NO_TREE = "the validator drafts no trees"


def _sees_its_siblings(self: Any, query: Any, cache: Any, metadata: Any, **options: Any) -> torch.Tensor:
    return TorchReference.forward(self, query, cache, replace(metadata, tree_masks=None), **options)


def _trees_are_chains(self: Any, query: Any, cache: Any, metadata: Any, **options: Any) -> torch.Tensor:
    if metadata.tree_masks is not None:
        index = torch.arange(metadata.num_tokens) - metadata.query_start_loc[metadata.token_to_req]
        # All bits up to its own; of the last there is, all.
        metadata = replace(metadata, tree_masks=torch.where(index < 63, (1 << (index + 1).clamp(max=63)) - 1, -1))
    return TorchReference.forward(self, query, cache, metadata, **options)


def _keeps_the_masks_it_was_built_with(self: Any, batch: Any, *, horizon: int = 0) -> Any:
    metadata = ReferenceBuilder.build(self, batch, horizon=horizon)
    masks = metadata.tree_masks
    return metadata if masks is None else replace(metadata, tree_masks=masks.clone())


class MergesTrees(TritonPaged):
    """Trees as kernels serve them that know none: a prefix with its lse, then the tree. Right as it stands."""

    name = "merges_trees"
    builder: Any = FlashAttn3Builder
    lse_base_2 = False

    def forward(self, query: Any, cache: Any, metadata: Any, *, spec: Any, sinks: Any = None) -> torch.Tensor:
        if metadata.tree_masks is None or spec.sliding_window:
            return super().forward(query, cache, metadata, spec=spec, sinks=sinks)
        tensors = (metadata.query_start_loc, metadata.kv_lens, metadata.block_table, None)
        sizes = (spec.softmax_scale, False, -1, -1, spec.soft_cap or 0.0)
        out, lse = flash_attn3_stand_in.attend(query, cache.key, cache.value, *tensors, *sizes)
        return merge_tree(out, lse.t(), query, cache, metadata, spec, sinks, lse_base_2=self.lse_base_2)


class _MistakesTheBase(MergesTrees):
    lse_base_2 = True


class _CountsPrefixesOnce(FlashAttn3Builder):
    @classmethod
    def advance_support(cls, spec: AttentionSpec, device: torch.device) -> AdvanceSupport:
        return FlashAttn3Builder.advance_support(spec, device)

    def advance(self, metadata: FlashAttn3Metadata) -> None:
        if metadata.tree_masks is not None and not self._prefix_lens.any():
            super().advance(metadata)


class _LeavesPrefixes(MergesTrees):
    builder = _CountsPrefixesOnce


def _forgets_sinks(self: Any, query: Any, cache: Any, metadata: Any, *, spec: Any, sinks: Any = None) -> torch.Tensor:
    bare = replace(spec, sinks=False)
    return TorchReference.forward(self, query, cache, metadata, spec=bare, sinks=None)


def _takes_infinite_sinks_for_large(
    self: Any, query: Any, cache: Any, metadata: Any, *, spec: Any, sinks: Any = None
) -> torch.Tensor:
    finite = None if sinks is None else sinks.clamp(-10.0, 10.0)
    return TorchReference.forward(self, query, cache, metadata, spec=spec, sinks=finite)


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


def _stays(self: Any, metadata: Any) -> None: ...


def _writes_past_its_limit(self: Any, metadata: Any) -> None:
    """A row that became inert goes on with the next slot of its pages."""
    ReferenceBuilder.advance(self, metadata)
    position, size = metadata.positions + 1, self.spec.page_size
    column = (position // size).clamp(max=metadata.block_table.shape[1] - 1)
    page = metadata.block_table[metadata.token_to_req, column].long()
    inert = (metadata.slot_mapping < 0) & (page >= 0) & (position > 1)
    metadata.slot_mapping.copy_(torch.where(inert, page * size + position % size, metadata.slot_mapping))


def _advances_short_queries_only(self: Any, metadata: Any) -> None:
    if metadata.max_query_len <= 5:
        ReferenceBuilder.advance(self, metadata)


def _advances_decodes_only(self: Any, metadata: Any) -> None:
    if metadata.max_query_len == 1:
        ReferenceBuilder.advance(self, metadata)


def _knows_the_rows_of_its_build(self: Any, metadata: Any) -> None:
    ReferenceBuilder.advance(self, metadata)
    metadata.kv_end[self.live_at_build :] = 0


def _counts_live_rows(self: Any, batch: Any, *, horizon: int = 0) -> Any:
    metadata = ReferenceBuilder.build(self, batch, horizon=horizon)
    self.live_at_build = sum(length > 0 for length in batch.host_seq_lens) * batch.max_query_len
    return metadata


def _knows_the_rows_of_the_last_build(self: Any, metadata: Any) -> None:
    ReferenceBuilder.advance(self, metadata)
    token = torch.arange(metadata.num_tokens, device=metadata.kv_end.device)
    metadata.kv_end.copy_(torch.where(token < self.last_tokens, metadata.kv_end, 0))


def _notes_its_size(self: Any, batch: Any, *, horizon: int = 0) -> Any:
    if not hasattr(self, "last_tokens"):
        self.last_tokens = torch.zeros((), dtype=torch.int64, device=batch.seq_lens.device)
    self.last_tokens.fill_(batch.num_tokens)
    return ReferenceBuilder.build(self, batch, horizon=horizon)


def _keeps_what_it_builds(self: Any, batch: Any, *, horizon: int = 0) -> Any:
    self.kept = [*getattr(self, "kept", []), batch.seq_lens.clone()]
    return ReferenceBuilder.build(self, batch, horizon=horizon)


def _builds_what_thaws(self: Any, batch: Any, *, horizon: int = 0) -> Any:
    return _Thawed(**_fields(ReferenceBuilder.build(self, batch, horizon=horizon)))


_Thawed = make_dataclass("_Thawed", [(field.name, field.type) for field in fields(ReferenceMetadata)], kw_only=True)


class _WaitsForLengths(ReferenceBuilder):
    @classmethod
    def advance_support(cls, spec: AttentionSpec, device: torch.device) -> AdvanceSupport:
        return AdvanceSupport(AdvanceLevel.REBUILD, "it plans on the host, by lengths that it reads")

    def build(self, batch: Any, *, horizon: int = 0) -> Any:
        self.longest = int(batch.seq_lens.max())
        return super().build(batch, horizon=horizon)


class _KeepsAnInheritedClaim(ReferenceBuilder):
    def __init_subclass__(cls, **kwargs: Any) -> None: ...


class _AdvancesWithoutReason(ReferenceBuilder):
    @classmethod
    def advance_support(cls, spec: AttentionSpec, device: torch.device) -> AdvanceSupport:
        return AdvanceSupport(AdvanceLevel.IN_GRAPH, "")


class _PlansForThePresent(ForeseenBuilder):
    @classmethod
    def advance_support(cls, spec: AttentionSpec, device: torch.device) -> AdvanceSupport:
        return ForeseenBuilder.advance_support(spec, device)

    def build(self, batch: AttentionBatch, *, horizon: int = 0) -> ReferenceMetadata:
        return super().build(replace(batch, host_seq_lens=(*batch.seq_lens.tolist(),)), horizon=horizon)


class _Shortsighted(Foreseen):
    builder = _PlansForThePresent


def _as_long_as_the_last_row(
    self: Any, query: Any, cache: Any, metadata: Any, *, spec: Any, sinks: Any = None
) -> torch.Tensor:
    """As a grid by the last request's length is, where engines sort their requests."""
    last = torch.where(metadata.seq_lens > 0, torch.arange(metadata.num_reqs, device=query.device), 0).max()
    end = torch.minimum(metadata.kv_end, metadata.seq_lens[last[None]])
    return TorchReference.forward(self, query, cache, replace(metadata, kv_end=end), spec=spec, sinks=sinks)


def _live_rows_come_first(
    self: Any, query: Any, cache: Any, metadata: Any, *, spec: Any, sinks: Any = None
) -> torch.Tensor:
    live = metadata.token_to_req < (metadata.seq_lens > 0).sum()
    end = torch.where(live, metadata.kv_end, 0)
    return TorchReference.forward(self, query, cache, replace(metadata, kv_end=end), spec=spec, sinks=sinks)


def _rounds_by_the_page(
    self: Any, query: Any, cache: Any, metadata: Any, *, spec: Any, sinks: Any = None
) -> torch.Tensor:
    out = TorchReference.forward(self, query, cache, metadata, spec=spec, sinks=sinks)
    return out * (1 + 2e-7 * (metadata.block_table[0, 0] % 2))


class _EveryOtherCallRoundsUp(TorchReference):
    name = "every_other_call_rounds_up"

    def __init__(self) -> None:
        self.calls = torch.zeros(())

    def forward(self, query: Any, cache: Any, metadata: Any, *, spec: Any, sinks: Any = None) -> torch.Tensor:
        self.calls.add_(1)
        out = super().forward(query, cache, metadata, spec=spec, sinks=sinks)
        return out * (1 + 2e-7 * (self.calls % 2))


def _starts_cuda(self: Any, query: Any, cache: Any, metadata: Any, *, spec: Any, sinks: Any = None) -> torch.Tensor:
    torch.cuda.init()
    return TorchReference.forward(self, query, cache, metadata, spec=spec, sinks=sinks)


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
        registry.register(backend.name, load)
        yield backend.name


@contextmanager
def _under_another_name(backend: AttentionBackend) -> Iterator[str]:
    with cuda_that_starts():
        registry.register("another_name", lambda: backend)
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


def _consumes_its_metadata(self: Any, query: Any, cache: Any, metadata: Any, *, spec: Any, sinks: Any = None) -> Any:
    out = TorchReference.forward(self, query, cache, metadata, spec=spec, sinks=sinks)
    metadata.kv_end.sub_(1).clamp_(min=0)
    return out


_last: dict[str, Any] = {}
"""What two lies keep for the whole process: the window of the builder made last, and a block table by its shape."""


def _notes_its_window(self: Any, *args: Any, **bounds: int) -> None:
    ReferenceBuilder.__init__(self, *args, **bounds)
    _last["window"] = self.spec.sliding_window


def _advances_by_the_window_made_last(self: Any, metadata: Any) -> None:
    own, self.spec = self.spec, replace(self.spec, sliding_window=_last["window"])
    ReferenceBuilder.advance(self, metadata)
    self.spec = own


def _keeps_pages_by_shape(self: Any, batch: Any, *, horizon: int = 0) -> Any:
    _last[str(batch.block_table.shape)] = batch.block_table
    return ReferenceBuilder.build(self, batch, horizon=horizon)


def _attends_to_pages_by_shape(
    self: Any, query: Any, cache: Any, metadata: Any, *, spec: Any, sinks: Any = None
) -> torch.Tensor:
    kept = replace(metadata, block_table=_last[str(metadata.block_table.shape)])
    return TorchReference.forward(self, query, cache, kept, spec=spec, sinks=sinks)


def _only(wrong: Callable[[Any], bool]) -> Callable[..., torch.Tensor]:
    """A forward that is right but for the specs that `wrong` names."""

    def forward(self: Any, query: Any, cache: Any, metadata: Any, *, spec: Any, sinks: Any = None) -> torch.Tensor:
        out = TorchReference.forward(self, query, cache, metadata, spec=spec, sinks=sinks)
        return out.roll(1, 1) if wrong(spec) else out

    return forward


def _keeps_its_table(self: Any, metadata: Any) -> None:
    """The table is kept while the first page of every row is as it was."""
    ReferenceBuilder.advance(self, metadata)
    if not torch.equal(self.table[:, 0], self.live[:, 0]):
        self.table.copy_(self.live)


def _builds_with_a_table_of_its_own(self: Any, batch: Any, *, horizon: int = 0) -> Any:
    self.live = batch.block_table
    if not hasattr(self, "table") or self.table.shape != self.live.shape:
        self.table = self.live.clone()
    if not self.rebuilds or not torch.equal(self.table[:, 0], self.live[:, 0]):
        self.table.copy_(self.live)
    return replace(ReferenceBuilder.build(self, batch, horizon=horizon), block_table=self.table)


def _stops_after_500_advances(self: Any, metadata: Any) -> None:
    self.advances = getattr(self, "advances", 0) + 1
    if self.advances <= 500:
        ReferenceBuilder.advance(self, metadata)


def _is_one_short_in_wide_windows(
    self: Any, query: Any, cache: Any, metadata: Any, *, spec: Any, sinks: Any = None
) -> torch.Tensor:
    if (spec.sliding_window or 0) >= 128:
        first = metadata.kv_start + 1
        metadata = replace(metadata, kv_start=torch.where(metadata.kv_start > 0, first, metadata.kv_start))
    return TorchReference.forward(self, query, cache, metadata, spec=spec, sinks=sinks)


def _names_pages_in_15_bits(
    self: Any, query: Any, cache: Any, metadata: Any, *, spec: Any, sinks: Any = None
) -> torch.Tensor:
    table = metadata.block_table
    cut = replace(metadata, block_table=torch.where(table < 0, table, table & 0x7FFF))
    return TorchReference.forward(self, query, cache, cut, spec=spec, sinks=sinks)


def _returns_one_buffer(
    self: Any, query: Any, cache: Any, metadata: Any, *, spec: Any, sinks: Any = None
) -> torch.Tensor:
    out = TorchReference.forward(self, query, cache, metadata, spec=spec, sinks=sinks)
    if getattr(self, "out", out).shape != out.shape or not hasattr(self, "out"):
        self.out = torch.empty_like(out)
    return self.out.copy_(out)


def _serves_64_rows(self: Any, query: Any, cache: Any, metadata: Any, *, spec: Any, sinks: Any = None) -> torch.Tensor:
    out = TorchReference.forward(self, query, cache, metadata, spec=spec, sinks=sinks)
    return torch.where((metadata.token_to_req < 64)[:, None, None], out, 0.0)


def _counts_in_fp16(self: Any, query: Any, cache: Any, metadata: Any, *, spec: Any, sinks: Any = None) -> torch.Tensor:
    rounded = replace(metadata, kv_end=metadata.kv_end.half().int())
    return TorchReference.forward(self, query, cache, rounded, spec=spec, sinks=sinks)


def _stops_at_4096(self: Any, query: Any, cache: Any, metadata: Any, *, spec: Any, sinks: Any = None) -> torch.Tensor:
    cut = replace(metadata, kv_end=metadata.kv_end.clamp(max=4096))
    return TorchReference.forward(self, query, cache, cut, spec=spec, sinks=sinks)


def _subtracts_no_maximum(
    self: Any, query: Any, cache: Any, metadata: Any, *, spec: Any, sinks: Any = None
) -> torch.Tensor:
    out = TorchReference.forward(self, query, cache, metadata, spec=spec, sinks=sinks)
    keys = cache.key.flatten(0, 1).float().nan_to_num().repeat_interleave(spec.group_size, 1)
    scores = torch.einsum("thd,nhd->thn", query.float(), keys) * spec.softmax_scale
    return out + 0 * scores.exp().sum(-1, keepdim=True)


def _begins_its_maximum_at_a_number(
    self: Any, query: Any, cache: Any, metadata: Any, *, spec: Any, sinks: Any = None
) -> torch.Tensor:
    def softmax(scores: torch.Tensor, *rest: Any) -> torch.Tensor:
        return softmax_with_sinks(scores, *rest) * (scores.amax(-1, keepdim=True) > -5e4)

    with mock.patch("attn_backends.torch_reference.softmax_with_sinks", softmax):
        return TorchReference.forward(self, query, cache, metadata, spec=spec, sinks=sinks)


def _knows_one_layout(
    self: Any, query: Any, cache: Any, metadata: Any, *, spec: Any, sinks: Any = None
) -> torch.Tensor:
    plain = [t.as_strided(t.shape, torch.empty(t.shape, device="meta").stride()) for t in (cache.key, cache.value)]
    return TorchReference.forward(self, query, KVCache(*plain), metadata, spec=spec, sinks=sinks)


def _reads_each_page_once(
    self: Any, query: Any, cache: Any, metadata: Any, *, spec: Any, sinks: Any = None
) -> torch.Tensor:
    table = metadata.block_table
    seen = (table[1:, :1] == table[:1, :1]) & (table[:1, :1] >= 0)
    start = torch.cat([torch.zeros_like(metadata.seq_lens[:1]), seen[:, 0].int() * spec.page_size])
    later = torch.maximum(metadata.kv_start, start[metadata.token_to_req].to(metadata.kv_start.dtype))
    return TorchReference.forward(self, query, cache, replace(metadata, kv_start=later), spec=spec, sinks=sinks)


def _states_its_own_bound(self: Any, metadata: Any) -> Any:
    return replace(ReferenceBuilder.capture_constants(self, metadata), max_seq_len=self.max_seq_len)


def _reads_lengths_in_build(self: Any, batch: Any, *, horizon: int = 0) -> Any:
    assert int(batch.seq_lens.max()) >= 0
    return ReferenceBuilder.build(self, batch, horizon=horizon)


def _lists_lengths_in_build(self: Any, batch: Any, *, horizon: int = 0) -> Any:
    assert (batch.seq_lens + 1).tolist()
    return ReferenceBuilder.build(self, batch, horizon=horizon)


def _unseen_after_five_advances(self: Any, metadata: Any) -> None:
    """No attention shows it: whoever begins at -1 sees what one that begins at 0 sees."""
    ReferenceBuilder.advance(self, metadata)
    self.advances = getattr(self, "advances", 0) + 1
    if self.advances > 5:
        metadata.kv_start.masked_fill_(metadata.kv_start == 0, -1)


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


def _fields(record: Any) -> dict[str, Any]:
    return {field.name: getattr(record, field.name) for field in fields(record)}


def _rounds_by_the_rows(self: Any, query: Any, cache: Any, metadata: Any, **options: Any) -> torch.Tensor:
    """The last bit of every output tells whether it was alone."""
    out = TorchReference.forward(self, query, cache, metadata, **options)
    bits(out).bitwise_and_(-2).bitwise_or_(int(metadata.num_reqs == 1))
    return out


def _claims(name: str, killer: str, *, around: Any = nullcontext, cases: str = "*", **attributes: Any) -> Mutant:
    attributes = {"name": name, **attributes}
    return Mutant(name, killer, type(name, (TorchReference,), attributes)(), cases=cases, around=around)


def _builder_mutant(
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
        methods["build"] = _right_build
        methods["broken_advance"] = methods["advance"]
        methods["advance"] = _broken_once_built
    return Mutant(name, killer, with_builder(derived(name, **methods)), not_shown, refused, cases)


def _right_build(self: Any, batch: Any, *, horizon: int = 0) -> Any:
    self.building = True
    metadata = self.first_build(batch, horizon=horizon)
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
    _builder_mutant(
        "off_by_one_slot_at_a_page_edge",
        "numerics.attention_is_right",
        cases="page_*",
        build=_off_by_one_at_a_page_edge,
    ),
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
    Mutant("top_left_causal", "numerics.attention_is_right", with_forward(_top_left_causal), cases="base-*"),
    Mutant("gqa_interleaved", "numerics.attention_is_right", with_forward(_interleaved_groups), cases="base-*"),
    Mutant(
        "forgets_sinks",
        "numerics.attention_is_right",
        with_forward(_forgets_sinks),
        not_shown="the draft of a backend of keys and values has no sinks",
        cases="sinks-*",
    ),
    Mutant(
        "takes_infinite_sinks_for_large",
        "numerics.infinite_sinks_are_defined",
        with_forward(_takes_infinite_sinks_for_large),
        not_shown="a draft's sinks are finite",
    ),
    Mutant(
        "blocks_are_causal",
        "numerics.blocks_see_what_is_behind",
        with_forward(_blocks_are_causal),
        not_shown=_NO_BLOCK,
    ),
    Mutant(
        "windows_of_a_blocks_end",
        "numerics.blocks_see_what_is_behind",
        with_builder(derived("windows_of_a_blocks_end", advance=_windows_end_at_a_blocks_own_tokens)),
        not_shown=_NO_BLOCK,
        cases="window-*",
    ),
    _builder_mutant(
        "ends_of_the_last_blocks",
        "graph.blocks_replay_over_other_batches",
        advance=_leaves_a_blocks_end,
        not_shown=_NO_BLOCK,
    ),
    Mutant(
        "sees_its_siblings", "numerics.trees_see_their_ancestors", with_forward(_sees_its_siblings), not_shown=_NO_TREE
    ),
    Mutant(
        "trees_are_chains", "numerics.trees_see_their_ancestors", with_forward(_trees_are_chains), not_shown=_NO_TREE
    ),
    _builder_mutant(
        "masks_of_the_last_round",
        "graph.tree_replays_over_other_trees",
        build=_keeps_the_masks_it_was_built_with,
        not_shown=_NO_TREE,
    ),
    _builder_mutant(
        "masks_of_the_capture",
        "drafter.strategies_agree_on_trees",
        build=_keeps_the_masks_it_was_built_with,
        not_shown=_NO_TREE,
        cases="k4-n3-dynamic",
    ),
    _builder_mutant(
        "advances_short_queries_only",
        "drafter.strategies_agree_on_blocks",
        advance=_advances_short_queries_only,
        not_shown=_NO_BLOCK,
        cases="k4-n3",
    ),
    Mutant("mistakes_the_base_of_an_lse", "numerics.trees_see_their_ancestors", _MistakesTheBase(), not_shown=_NO_TREE),
    Mutant("prefixes_of_the_last_trees", "graph.tree_replays_over_other_trees", _LeavesPrefixes(), not_shown=_NO_TREE),
    Mutant("reads_past_the_end", "poison.stale_table_entries_are_not_read", with_forward(_reads_a_token_too_many)),
    Mutant(
        "reads_unwritten_scratch",
        "poison.uninitialised_memory_is_not_read",
        with_forward(_uses_scratch_unwritten),
    ),
    Mutant("checks_no_input", "refusal.bad_tensors_never_reach_a_kernel", with_forward(_checks_nothing)),
    _builder_mutant(
        "writes_past_its_limit",
        "builder.limits_hold",
        advance=_writes_past_its_limit,
        not_shown="what a request writes past its limit, nobody reads",
    ),
    _builder_mutant(
        "metadata_that_thaws",
        "contract.metadata_is_frozen",
        build=_builds_what_thaws,
        not_shown="a field could be bound to another tensor, and nobody does it",
    ),
    _builder_mutant(
        "rows_of_its_build",
        "graph.loop_replays_over_other_batches",
        build=_counts_live_rows,
        advance=_knows_the_rows_of_its_build,
        refused=TypeError,
    ),
    _builder_mutant(
        "rows_of_the_last_build",
        "graph.two_sizes_interleave",
        build=_notes_its_size,
        advance=_knows_the_rows_of_the_last_build,
    ),
    _builder_mutant("advances_decodes_only", "graph.verify_replays_over_other_batches", advance=_advances_decodes_only),
    _builder_mutant("advance_does_nothing", "drafter.strategies_agree", cases="k3-n3", advance=_stays),
    Mutant(
        "kv_end_as_built",
        "drafter.steps_attend_to_the_logical_prefix",
        freeze("torch_reference", "kv_end"),
        cases="k4-n3",
    ),
    Mutant(
        "live_rows_come_first",
        "drafter.requests_stop_on_their_own",
        with_forward(_live_rows_come_first),
        cases="k4-n7",
    ),
    Mutant(
        "waits_for_lengths",
        "drafter.a_round_never_waits",
        with_builder(_WaitsForLengths),
        not_shown="what it waits for is right",
        cases="k4-n3",
    ),
    Mutant("plans_for_the_present", "builder.plans_ahead_attend_right", _Shortsighted()),
    Mutant("as_long_as_the_last_row", "poison.request_order_does_not_matter", with_forward(_as_long_as_the_last_row)),
    Mutant(
        "rounds_by_the_page",
        "poison.page_order_does_not_matter",
        with_forward(_rounds_by_the_page),
        not_shown="its error is within the budget",
    ),
    Mutant(
        "every_other_call_rounds_up",
        "graph.replay_equals_eager",
        _EveryOtherCallRoundsUp(),
        not_shown="its error is within the budget",
    ),
    Mutant(
        "accepts_everything",
        "refusal.unclaimed_is_refused",
        _AcceptsEverything(),
        not_shown="what a backend accepts is asked before there is a drafter",
    ),
)

CLAIM_MUTANTS = (
    _claims("of_another_contract", "contract.version_matches", contract_version=(2, 0)),
    _claims("called_otherwise", "contract.name_is_the_registered_one", around=_under_another_name),
    _claims(
        "capabilities_with_a_function",
        "contract.capabilities_are_data",
        capabilities=_CapabilitiesWithAFunction(**_fields(TorchReference.capabilities)),
    ),
    _claims("answers_yes_or_no", "contract.supports_answers_with_reasons", supports=_answers_yes_or_no),
    _claims("advances_without_reason", "contract.builder_declares_itself", builder=_AdvancesWithoutReason),
    _claims("keeps_an_inherited_claim", "contract.overriding_build_drops_the_claim", builder=_KeepsAnInheritedClaim),
    _claims("starts_cuda", "contract.cpu_use_touches_no_cuda", forward=_starts_cuda, around=_where_cuda_starts),
    _claims("starts_cuda_when_loaded", "contract.loading_touches_no_cuda", around=_starting_when_loaded),
    _claims(
        "keeps_what_it_builds",
        "builder.rounds_keep_no_memory",
        builder=derived("Keeps", build=_keeps_what_it_builds),
    ),
    _claims("gives_one_reason", "refusal.all_reasons_at_once", supports=_gives_one_reason),
    _claims("takes_any_write", "refusal.bad_writes_never_reach_a_kernel", write_kv=_takes_any_write),
)
"""Beside the others: what is wrong with them, no round of a drafter comes to."""

ONE_PAGE_SIZE = _lists_pages("pages_have_16_tokens", "builder.advance_means_a_rebuild", counts=_pages_of_16)
"""Beside the others: it is right in pages of 16 tokens, which a test's drafter has unless it asks for others."""

FUSED_WRITE_MUTANTS = (
    Mutant("fused_without_key_rotation", "numerics.fused_rope_write_stores_the_same", _FusedWithoutKeyRotation()),
    Mutant("fused_without_query_rotation", "numerics.fused_rope_write_stores_the_same", _FusedWithoutQueryRotation()),
    Mutant("fused_writes_padding", "numerics.fused_rope_write_stores_the_same", _FusedWritesPadding()),
    Mutant("fused_with_another_epsilon", "numerics.fused_latent_write_stores_the_same", _FusedWithAnotherEpsilon()),
)
"""Beside the others: metadata is right, so that no validation of a running drafter shows them."""

_OF_A_LAYER = "drafter.layers_and_groups_attend_to_their_own_prefix"
_EDGES = "numerics.edges_are_right"

EDGE_MUTANTS = (
    _claims("consumes_its_metadata", _OF_A_LAYER, forward=_consumes_its_metadata),
    _claims(
        "keeps_pages_by_shape",
        _OF_A_LAYER,
        builder=derived("KeepsPages", build=_keeps_pages_by_shape),
        forward=_attends_to_pages_by_shape,
    ),
    _claims(
        "advances_by_the_window_made_last",
        "drafter.strategies_agree_on_layers_and_groups",
        builder=derived(
            "LastWindow",
            __init__=_notes_its_window,
            first_build=ReferenceBuilder.build,
            build=_right_build,
            broken_advance=_advances_by_the_window_made_last,
            advance=_broken_once_built,
        ),
    ),
    _claims("changes_its_metadata", "numerics.forward_leaves_its_inputs_alone", forward=_consumes_its_metadata),
    _claims("serves_64_rows", _EDGES, cases="rows_96", forward=_serves_64_rows),
    _claims("counts_in_fp16", _EDGES, cases="length_4099", forward=_counts_in_fp16),
    _claims("stops_at_4096", _EDGES, cases="length_4099", forward=_stops_at_4096),
    _claims("one_short_in_wide_windows", _EDGES, cases="window_128", forward=_is_one_short_in_wide_windows),
    _claims("pages_in_15_bits", _EDGES, cases="far_pages", forward=_names_pages_in_15_bits),
    _claims("returns_one_buffer", "numerics.forward_leaves_its_inputs_alone", forward=_returns_one_buffer),
    _claims(
        "stops_after_500_advances",
        "builder.advances_go_on",
        builder=derived("Stops", advance=_stops_after_500_advances),
    ),
    _claims(
        "keeps_a_table_by_its_first_page",
        "builder.advance_refreshes_another_batch",
        builder=derived("KeepsTable", rebuilds=False, build=_builds_with_a_table_of_its_own, advance=_keeps_its_table),
    ),
    _claims(
        "rebuilds_a_table_by_its_first_page",
        "builder.build_reuses_its_addresses",
        builder=derived("RebuildsTable", rebuilds=True, build=_builds_with_a_table_of_its_own),
    ),
    _claims("subtracts_no_maximum", _EDGES, cases="scores_200", forward=_subtracts_no_maximum),
    _claims(
        "begins_its_maximum_at_a_number", _EDGES, cases="one_key_of_low_score", forward=_begins_its_maximum_at_a_number
    ),
    _claims("wrong_for_groups_of_3", _EDGES, cases="group_3", forward=_only(lambda spec: spec.group_size == 3)),
    _claims("wrong_for_groups_of_7", _EDGES, cases="group_7", forward=_only(lambda spec: spec.group_size == 7)),
    _claims("wrong_for_pages_of_24", _EDGES, cases="page_24", forward=_only(lambda spec: spec.page_size == 24)),
    _claims("wrong_for_dims_of_192", _EDGES, cases="dim_192", forward=_only(lambda spec: spec.head_dim == 192)),
    _claims("wrong_for_dims_above_256", _EDGES, cases="dim_512", forward=_only(lambda spec: spec.head_dim > 256)),
    _claims(
        "rounds_by_the_rows",
        "numerics.bits_do_not_depend_on_the_batch",
        capabilities=replace(TorchReference.capabilities, features=frozenset(Feature)),
        forward=_rounds_by_the_rows,
    ),
    _claims("knows_one_layout", "numerics.strides_are_followed", forward=_knows_one_layout),
    _claims("reads_each_page_once", "numerics.shared_pages_are_read_by_each_row", forward=_reads_each_page_once),
    _claims(
        "states_its_own_bound",
        "builder.constants_are_served",
        builder=derived("OwnBound", capture_constants=_states_its_own_bound),
    ),
    _claims(
        "reads_lengths_in_build",
        "builder.build_reads_no_device",
        builder=derived("Reads", build=_reads_lengths_in_build),
    ),
    _claims(
        "lists_lengths_in_build",
        "builder.build_reads_no_device",
        builder=derived("Lists", build=_lists_lengths_in_build),
    ),
    _claims(
        "unseen_after_five_advances",
        "graph.replayed_advances_mean_a_rebuild",
        builder=derived("Unseen", advance=_unseen_after_five_advances),
    ),
)
"""Beside the others: right in every other check, and in a drafter of one layer at the usual sizes."""

ALL_MUTANTS = (*MUTANTS, *CLAIM_MUTANTS, *FUSED_WRITE_MUTANTS, *EDGE_MUTANTS, ONE_PAGE_SIZE)

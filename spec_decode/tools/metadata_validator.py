"""Validate a running drafter: does what its kernels read still equal a fresh build of the batch?

Data that a graph replays can go stale with no sign other than a lower acceptance rate. After every N-th round a
validation checks, for step 0 and for the last step of the round:

    fields      each group's metadata, in place, against a fresh builder's for the same shared state
    addresses   against the first validation's: a graph would keep using the old ones
    attention   one call per group over the caches, with random queries, against the oracle over each prefix

Nothing of the drafter is written to: builders get a copy of the shared state, and attention only reads. A validation
syncs with the device, and the oracle computes on the host in fp64 what the device did: from milliseconds for short
requests to seconds for long ones (`milliseconds` has the sum). Use it to search for a fault, or for one round of many.

For groups that are rebuilt before use (all, in the eager strategy), only attention is compared. A preplanned group can
hold tokens that a request did not get; its rows that stopped early are skipped.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from attn_backends import KVCache
from builders import AttentionBatch, MetadataBuilder
from builders.errors import require
from spec_decode.drafter import Drafter, Drafts, StepMetadata, VerifiedTokens
from spec_decode.paged.kv_groups import KVGroup
from spec_decode.testing.layouts import layout_of
from spec_decode.testing.metadata_fields import (
    changed_since,
    copies_of,
    expect_same_fields,
    memory_layouts_of,
    moved_since,
    tensors_of,
)
from spec_decode.testing.oracle import LogicalBatch, assert_within_budget
from spec_decode.testing.outcome import CheckFailure, expect
from spec_decode.testing.poison import poisoned_allocations


class MetadataDrift(RuntimeError):
    """A running drafter's kernels read metadata that does not match the batch. round: from 1; step: 0 or the last."""

    def __init__(self, round_: int, step: int, group: str, failure: CheckFailure) -> None:
        super().__init__(
            f"metadata no longer matches the batch in round {round_}, step {step}, group {group}: {failure}. Later "
            "drafts can be silently wrong. `attn-backends check` names the broken rule."
        )
        self.round, self.step, self.group = round_, step, group
        self.contract, self.expected, self.got = failure.contract, failure.expected, failure.got


class MetadataValidator:
    """Runs the drafter's rounds and validates every N-th.

    rounds, validations: counts so far. milliseconds: total time of all validations.
    """

    def __init__(self, drafter: Drafter, *, every: int = 1) -> None:
        """Raises BatchError unless every is at least 1."""
        require(
            every >= 1,
            f"every must be 1 or more, got {every}; nothing is validated. Pass 1 to validate every round.",
        )
        self.drafter = drafter
        self.every = every
        self.rounds = self.validations = 0
        self.milliseconds = 0.0
        self._random = torch.Generator().manual_seed(0)
        self._addresses: dict[tuple[int, int, int], dict[str, tuple[Any, ...]]] = {}

    def propose(self, verified: VerifiedTokens | None = None, num_tokens: int | None = None) -> Drafts:
        """Run `Drafter.propose`, and a validation after every N-th. Raises MetadataDrift for the first difference."""
        drafts = self.drafter.propose(verified, num_tokens)
        self.rounds += 1
        if self.rounds % self.every == 0:
            self.validate()
        return drafts

    @torch.no_grad()
    def validate(self) -> None:
        """Validate the last round. Call it after `propose` and before the tables change. Raises MetadataDrift."""
        start = time.perf_counter()
        try:
            for step, used in self.drafter.metadata_in_use().items():
                self._validate_step(step, used)
        finally:
            self.milliseconds += 1000 * (time.perf_counter() - start)
        self.validations += 1

    def _validate_step(self, step: int, used: StepMetadata) -> None:
        for index, group in enumerate(self.drafter.groups):
            try:
                self._validate_group(index, used, step)
            except CheckFailure as failure:
                raise MetadataDrift(self.rounds, step, group.name, failure) from failure

    def _validate_group(self, index: int, used: StepMetadata, step: int) -> None:
        group, found, buffers = self.drafter.groups[index], used.metadata[index], used.buffers
        self._expect_addresses((buffers.query_len, index, used.size), found)
        now = buffers.batch.seq_lens[: used.size]
        batch = buffers.attention_batch(index, used.size, _seq_lens_of_last_step(used) if step else now)
        copies: dict[str, Any] = copies_of(batch)
        copy = replace(batch, **copies)
        found = _over_copy(found, replace(batch, seq_lens=now), copy)
        plan = self.drafter.plan
        if index not in (*plan.rebuild_groups, *plan.preplanned_groups):
            _expect_fields(buffers.new_builder(index), found, copy, max(0, buffers.horizon - step))
        preplanned = step > 0 and index in plan.preplanned_groups
        self._expect_attention(used, group, found, copy, padding_too=not preplanned)

    def _expect_addresses(self, key: tuple[int, int, int], found: Any) -> None:
        moved = moved_since(self._addresses.setdefault(key, memory_layouts_of(found)), found)
        expect(
            not moved,
            contract=f"metadata stays at its addresses: field {', '.join(sorted(moved))}",
            expected="the addresses of the first validation",
            got="others",
        )

    def _expect_attention(
        self, used: StepMetadata, group: KVGroup, found: Any, batch: AttentionBatch, *, padding_too: bool
    ) -> None:
        """Run one call over the first layer's current cache, with every allocation poisoned."""
        spec, device = group.spec, self.drafter.tables.device
        shape = (batch.num_tokens, spec.num_q_heads, spec.head_dim)
        queries = torch.randn(shape, generator=self._random).to(spec.dtype)
        sinks = torch.randn(spec.num_q_heads, generator=self._random) if spec.sinks else None
        cache = next(iter(group.caches.values()))
        moved = queries.to(device), None if sinks is None else sinks.to(device)
        with poisoned_allocations():
            out = group.backend.forward(moved[0], cache, found, spec=spec, sinks=moved[1])
        out = out.cpu().unflatten(0, (used.size, -1))
        lens = batch.seq_lens.tolist()
        rows = [row for row, length in enumerate(lens) if length]
        idle = [row for row, length in enumerate(lens) if not length]
        expect(
            not padding_too or bool((out[idle] == 0).all()),
            contract="rows without a request attend to nothing",
            expected="output 0",
            got=f"up to {out[idle].abs().max().item() if idle else 0.0:.2e}",
        )
        if rows:
            prefixes = [_prefix(group, cache, batch.block_table[row], lens[row]) for row in rows]
            by_row = queries.unflatten(0, (used.size, -1))
            logical = LogicalBatch(
                queries=[by_row[row] for row in rows],
                keys=[key for key, _ in prefixes],
                values=[value for _, value in prefixes],
                seq_lens=[lens[row] for row in rows],
                sinks=sinks,
            )
            attended, able = out[rows].flatten(0, 1), group.backend.capabilities
            assert_within_budget(attended, logical, spec, able, contract="attention over the current caches")


def _expect_fields(builder: MetadataBuilder[Any], found: Any, batch: AttentionBatch, horizon: int) -> None:
    before = copies_of(batch)
    fresh = builder.build(batch, horizon=horizon)
    written = changed_since(before, batch)
    expect(not written, contract="build() leaves its input unchanged", expected="no change", got=f"{written} changed")
    expect_same_fields(found, fresh, "in place")


def _seq_lens_of_last_step(used: StepMetadata) -> torch.Tensor:
    """Return int32 [size] on the device: the lengths that the last step attended over.

    Sampling the last token that a row drafts makes it inert, so seq_lens no longer show them. The preceding advance
    gave a slot to each row that took part, with its position.
    """
    batch, size = used.buffers.batch, used.size
    return torch.where(batch.slot_mappings[0, :size] >= 0, batch.positions[:size] + 1, 0).int()


def _over_copy(found: Any, live: AttentionBatch, copy: AttentionBatch) -> Any:
    """Copy the metadata; fields that view the live batch become views of the batch's copy."""
    shared, copied = tensors_of(live), tensors_of(copy)
    fields = {}
    for name, tensor in tensors_of(found).items():
        source = next((key for key, other in shared.items() if _same_memory(tensor, other)), None)
        seen = None if source is None else _same_view(tensor, shared[source], copied[source])
        fields[name] = tensor.clone() if seen is None else seen
    return replace(found, **fields)


def _same_memory(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    return tensor.numel() > 0 and tensor.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def _same_view(tensor: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor | None:
    """Return the view of target that tensor is of source; None if it reaches beyond source, or has another type."""
    begin = tensor.storage_offset() - source.storage_offset()
    last = begin + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    inside = begin >= 0 and last < target.numel() and source.stride() == target.stride()
    if not inside or tensor.dtype != target.dtype:
        return None
    return target.as_strided(tensor.shape, tensor.stride(), target.storage_offset() + begin)


def _prefix(group: KVGroup, cache: KVCache, table: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the keys and values of a request's first tokens, on the CPU, by looking them up in the page table."""
    size = group.spec.page_size
    pages = table[: -(-length // size)].long()
    own, layout = replace(cache, key=cache.key[pages].cpu(), value=cache.value[pages].cpu()), layout_of(group.spec)
    taken: Sequence[tuple[torch.Tensor, torch.Tensor]] = [layout.take(own, *divmod(p, size)) for p in range(length)]
    key, value = (torch.stack([pair[part] for pair in taken]) for part in (0, 1))
    return key, value

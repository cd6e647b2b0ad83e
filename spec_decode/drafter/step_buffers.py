"""One batch shape of a drafter: step 0 has 1 + K tokens a row, later steps have one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from builders import AttentionBatch, BatchBuffers, CaptureConstants, HostLengths, MetadataBuilder, RequestTables
from spec_decode.drafter.kv_groups import KVGroup


class StepBuffers:
    """The buffers of the shape, and each group's builder and current metadata over them."""

    def __init__(
        self,
        groups: Sequence[KVGroup],
        tables: RequestTables,
        *,
        query_len: int,
        horizon: int,
        planned: Sequence[int] = (),
    ) -> None:
        """query_len: tokens of every row; horizon: advances that metadata must survive between two builds; planned:
        groups whose metadata is built for each of these advances before the first.
        """
        self.batch = BatchBuffers(tables, max_tokens=tables.max_reqs * query_len)
        self.batch.set_uniform(query_len)
        self.query_len = query_len
        self.horizon = horizon
        self.builders = [self._builder(group) for group in groups]
        self.metadata: list[Any] = [None] * len(groups)
        # A builder for each step: its persistent buffers hold one step's plan.
        self._ahead = {index: [self._builder(groups[index]) for _ in range(horizon)] for index in planned}
        self._planned: dict[int, list[Any]] = {}

    def _builder(self, group: KVGroup) -> MetadataBuilder[Any]:
        tables = self.batch.tables
        return group.make_builder(
            tables.device,
            max_reqs=tables.max_reqs,
            max_tokens=self.batch.max_tokens,
            max_seq_len=tables.max_seq_len,
        )

    def rebuild(self, size: int, groups: Sequence[int] | range) -> None:
        """Build the metadata of these groups for the state as it stands."""
        for index in groups:
            builder = self.builders[index]
            self.metadata[index] = builder.build(self._view(index, size, builder), horizon=self.horizon)

    def plan_ahead(self, size: int) -> None:
        """Build the planned groups' metadata of every step to come, from the state before the first advance."""
        for index, builders in self._ahead.items():
            if builders:
                now = self._view(index, size, builders[0])
                self._planned[index] = [b.build(self._after(now, step)) for step, b in enumerate(builders, start=1)]

    def at_step(self, step: int) -> list[Any]:
        """Each group's metadata for the step behind that many advances."""
        return [
            self._planned[index][step - 1] if index in self._planned else metadata
            for index, metadata in enumerate(self.metadata)
        ]

    def advance(self, groups: Sequence[int] | range) -> None:
        """Refresh the metadata of these groups in place."""
        for index in groups:
            self.builders[index].advance(self.metadata[index])

    def constants(self) -> CaptureConstants:
        """The tightest of the groups' constants."""
        each = [b.capture_constants(m) for b, m in zip(self.builders, self.metadata, strict=True)]
        for index, planned in self._planned.items():
            each += [b.capture_constants(m) for b, m in zip(self._ahead[index], planned, strict=True)]
        return CaptureConstants(
            max_reqs=min(c.max_reqs for c in each),
            max_query_len=min(c.max_query_len for c in each),
            max_seq_len=min(c.max_seq_len for c in each),
        )

    def _after(self, now: AttentionBatch, steps: int) -> AttentionBatch:
        """The view as the host foresees it: live rows longer by so many tokens, up to their limits."""
        if now.host_seq_lens is None or not now.host_seq_lens_exact:
            return now
        limits = [*self.batch.tables.limits_host, *(0,) * now.num_reqs]
        lens = tuple(min(n + steps, limit) if n else 0 for n, limit in zip(now.host_seq_lens, limits, strict=False))
        return replace(now, host_seq_lens=lens)

    def _view(self, index: int, size: int, builder: MetadataBuilder[Any]) -> AttentionBatch:
        lengths, exact = None, False
        if builder.host_lengths is HostLengths.EXACT:
            lengths, exact = self.batch.seq_lens[:size].tolist(), True
        elif builder.host_lengths is HostLengths.UPPER_BOUND:
            limits = self.batch.tables.limits_host
            lengths = [*limits, *(0,) * (size - len(limits))][:size]
        return self.batch.view(
            index,
            num_reqs=size,
            num_tokens=size * self.query_len,
            max_query_len=self.query_len,
            host_seq_lens=lengths,
            host_seq_lens_exact=exact,
        )

"""One batch shape of a drafter: step 0 has 1 + K tokens a row, later steps have one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from builders import AttentionBatch, BatchBuffers, CaptureConstants, HostLengths, MetadataBuilder, RequestTables
from spec_decode.kv_groups import KVGroup


class Phase:
    """The buffers of the shape, and each group's builder and current metadata over them."""

    def __init__(self, groups: Sequence[KVGroup], tables: RequestTables, *, query_len: int, horizon: int) -> None:
        """query_len: tokens of every row; horizon: advances that metadata must survive between two builds."""
        self.batch = BatchBuffers(tables, max_tokens=tables.max_reqs * query_len)
        self.batch.set_uniform(query_len)
        self.query_len = query_len
        self.horizon = horizon
        self.builders: list[MetadataBuilder[Any]] = [
            group.make_builder(
                tables.device,
                max_reqs=tables.max_reqs,
                max_tokens=self.batch.max_tokens,
                max_seq_len=tables.max_seq_len,
            )
            for group in groups
        ]
        self.metadata: list[Any] = [None] * len(groups)

    def rebuild(self, size: int, groups: Sequence[int] | range) -> None:
        """Build the metadata of these groups for the state as it stands."""
        for index in groups:
            builder = self.builders[index]
            self.metadata[index] = builder.build(self._view(index, size, builder), horizon=self.horizon)

    def advance(self, groups: Sequence[int] | range) -> None:
        """Refresh the metadata of these groups in place."""
        for index in groups:
            self.builders[index].advance(self.metadata[index])

    def constants(self) -> CaptureConstants:
        """The tightest of the groups' constants."""
        each = [b.capture_constants(m) for b, m in zip(self.builders, self.metadata, strict=True)]
        return CaptureConstants(
            max_reqs=min(c.max_reqs for c in each),
            max_query_len=min(c.max_query_len for c in each),
            max_seq_len=min(c.max_seq_len for c in each),
        )

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

"""One request's prompt at fixed addresses, for graphs that hold its attention too: the host then launches nothing for a
layer, and the first token is there as soon as the device has done its work.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from builders import BatchBuffers, CaptureConstants, GraphSupport, HostLengths, RequestTables
from spec_decode.paged import KVGroup, StateGroup
from spec_decode.paged.attention import PagedAttention
from spec_decode.paged.kv_groups import check_pools
from spec_decode.paged.metadata_plan import MetadataPlan
from spec_decode.paged.step_metadata import tightest


@dataclass(frozen=True, slots=True)
class PreparedPrompt:
    """A padded number of tokens.

    attention  over metadata that `advance` refreshes in place, from the buffers as they are then
    constants  what a capture of both bakes in
    """

    attention: PagedAttention
    advance: Callable[[], None]
    constants: CaptureConstants


class OnePrompt:
    """The buffers of one request's tokens, and each group's builder over them."""

    def __init__(self, groups: Sequence[KVGroup | StateGroup], tables: RequestTables, longest: int) -> None:
        """tables: of the request, in their first row. longest: the most tokens. Raises BatchError as `check_pools`."""
        check_pools(groups, tables)
        self._groups = tuple(groups)
        self._batch = BatchBuffers(tables, max_tokens=longest)
        self._builders = [group.make_builder(tables, longest) for group in groups]
        self.positions = self._batch.positions
        """int64 [longest]; 0 in padding."""

    @staticmethod
    def serves(groups: Sequence[KVGroup | StateGroup], plan: MetadataPlan) -> bool:
        """Whether the steps' graphs hold all attention without work of the host, and every group can be captured over
        any batch. A batch-invariant one would get as many splits as its longest text needs."""
        every = [group.facts for group in plan.groups]
        return (
            plan.host_reason is None
            and all(isinstance(group, KVGroup) and not group.spec.batch_invariant for group in groups)
            and all(facts.graph_support is GraphSupport.ALWAYS for facts in every)
            and all(facts.host_lengths is HostLengths.NONE for facts in every)
        )

    def over(self, tables: RequestTables) -> bool:
        """Whether these are the tables that the buffers belong to."""
        return tables is self._batch.tables

    def load(self, count: int, seq_len: int) -> CaptureConstants:
        """Write the state of the request's last `count` of seq_len tokens; return what a replay needs. Raises
        BatchError, and writes nothing, as `BatchBuffers.load`."""
        self._batch.load([count], [seq_len])
        return CaptureConstants(max_reqs=1, max_query_len=count, max_seq_len=seq_len)

    def prepare(self, size: int) -> PreparedPrompt:
        """Build every group's metadata for up to `size` tokens, over a padding row with as many."""
        self._batch.set_uniform(size)
        views = [
            self._batch.view(index, num_reqs=1, num_tokens=size, max_query_len=size, uniform=False)
            for index in range(len(self._groups))
        ]
        metadata = [builder.build(view) for builder, view in zip(self._builders, views, strict=True)]
        advances = [partial(builder.advance, each) for builder, each in zip(self._builders, metadata, strict=True)]

        def advance() -> None:
            for each in advances:
                each()

        constants = tightest([b.capture_constants(m) for b, m in zip(self._builders, metadata, strict=True)])
        return PreparedPrompt(PagedAttention(self._groups, metadata), advance, constants)

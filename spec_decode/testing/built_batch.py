"""A batch in the paged fixture: its metadata, built and advanced, and its attention compared with the oracle."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from builders import AttentionBatch, advance_state
from builders.batch import NO_SLOT
from spec_decode.graphs import runtime_for
from spec_decode.testing.batches import Batch, Case
from spec_decode.testing.metadata_fields import changed_since, copies_of
from spec_decode.testing.outcome import CheckFailure, Measurements, expect
from spec_decode.testing.paged_fixture import PagedFixture
from spec_decode.testing.subject import Subject


class BuiltBatch:
    """A batch in a paged fixture with its shared state, a builder, its metadata, and the current lengths."""

    def __init__(
        self, fixture: PagedFixture, batch: Batch, *, horizon: int = 0, max_seq_len: int | None = None
    ) -> None:
        """Load the batch into the fixture and build its metadata with a fresh builder. max_seq_len: as in `view`."""
        self.fixture, self.batch = fixture, batch
        self.seq_lens = list(batch.seq_lens)
        self.ended: int | None = None
        self.buffers, self.builder = fixture.load(batch), fixture.builder()
        view = fixture.view(self.buffers, batch, max_seq_len=max_seq_len)
        self.metadata = self.builder.build(view, horizon=horizon)

    @classmethod
    def of(cls, subject: Subject, case: Case, *, horizon: int = 0) -> BuiltBatch:
        """Build a case's batch in a fixture of its own. Raises as `PagedFixture`."""
        return cls(PagedFixture.of(subject, case), case.batch, horizon=horizon)

    def view(self) -> AttentionBatch:
        """Return what a builder sees now."""
        lens = [0 if request == self.ended else length for request, length in enumerate(self.seq_lens)]
        return self.fixture.view(self.buffers, self.batch, lens)

    def fresh(self, *, horizon: int = 0) -> Any:
        """Build metadata for the current state with a fresh builder."""
        return self.fixture.builder().build(self.view(), horizon=horizon)

    def move(self) -> None:
        """Move the shared state one token forward."""
        advance_state(self.buffers, self.batch.rows)
        self.seq_lens = [n + 1 for n in self.seq_lens]

    def advance(self) -> None:
        """Move the shared state one token forward and refresh the metadata. Raises CheckFailure if that changes it."""
        self.move()
        self._refresh()

    def _refresh(self) -> None:
        view = self.view()
        before = copies_of(view)
        self.builder.advance(self.metadata)
        changed = changed_since(before, view)
        expect(not changed, contract="advance() never writes into the batch", expected="no change", got=changed)

    def end(self, request: int) -> None:
        """Make a live row padding where it is, as a request becomes at its limit, and refresh the metadata."""
        first = sum(self.batch.query_lens[:request])
        self.buffers.seq_lens[request] = 0
        self.buffers.slot_mappings[:, first : first + self.batch.query_lens[request]] = NO_SLOT
        self.ended = request
        self._refresh()

    def put_in(self, batch: Batch) -> None:
        """Load another batch with the same number of rows into the same buffers."""
        self.fixture.replace_batch(self.buffers, batch)
        self.batch, self.seq_lens, self.ended = batch, list(batch.seq_lens), None

    def replace(self, batch: Batch) -> None:
        """Load another batch with the same number of rows into the same buffers and refresh the metadata."""
        self.put_in(batch)
        self._refresh()

    def attend(self, queries: Sequence[torch.Tensor] | None = None) -> torch.Tensor:
        """Write the query tokens and attend; output [num_tokens, num_q_heads, value_dim]. queries: fresh if None."""
        queries = self.fixture.queries(self.batch) if queries is None else queries
        return self.fixture.attend(self.metadata, self.batch, self.seq_lens, queries)

    def expect_attention(self, contract: str, *, cache: str = "", metadata: Any = None) -> Measurements:
        """Write the query tokens, attend, and compare with the oracle. Raises CheckFailure.

        cache: the contract under which the cache must hold the requests' tokens and nothing else; empty to skip that
        check. metadata: None for the batch's own.
        """
        queries = self.fixture.queries(self.batch)
        used = self.metadata if metadata is None else metadata
        try:
            return self._expect(used, queries, contract, cache)
        except CheckFailure:
            self._expect_slices_to_be_the_fault(used, queries, contract, cache)
            raise

    def _expect(self, metadata: Any, queries: Sequence[torch.Tensor], contract: str, cache: str) -> Measurements:
        out = self.fixture.attend(metadata, self.batch, self.seq_lens, queries)
        if cache and self.fixture.sick is None:
            self.fixture.expect_cache(self.seq_lens, contract=cache)
        return self._compare(out, queries, contract)

    def _expect_slices_to_be_the_fault(
        self, metadata: Any, queries: Sequence[torch.Tensor], contract: str, cache: str
    ) -> None:
        """After a failure, raise one that names strides if contiguous tensors are attended to correctly."""
        fixture = self.fixture
        fixture.poison()
        for request, (query, length) in enumerate(zip(self.batch.query_lens, self.seq_lens, strict=True)):
            fixture.put_prefix(request, length - query)
        fixture.slices = False
        try:
            self._expect(metadata, queries, contract, cache)
        except Exception:  # another failure, or none that strides explain: the first one stands
            return
        finally:
            fixture.slices = True
        raise CheckFailure(
            contract="write_kv() and forward() follow the strides of key, value and query",
            expected="the same attention for slices of a projection as for contiguous tensors",
            got="it is right only if they are contiguous",
        )

    def expect_replay(self, other: Batch, contract: str) -> Measurements:
        """Capture an advance, the write of the query tokens and their attention, replay it over another batch with the
        same number of rows, and compare with the oracle. Raises CheckFailure."""
        fixture, found = self.fixture, list[torch.Tensor]()
        inputs = fixture.inputs(self.batch, self.seq_lens, fixture.queries(self.batch))

        def attend() -> None:
            query, key, value = inputs
            self.builder.advance(self.metadata)
            fixture.subject.backend.write_kv(key, value, fixture.cache, self.metadata)
            found.append(fixture.forward(query, self.metadata))

        attend()
        captured = runtime_for(fixture.device).capture(attend)
        self.put_in(other)
        queries = fixture.queries(other)
        for old, new in zip(inputs, fixture.inputs(other, other.seq_lens, queries), strict=True):
            old.copy_(new)
        captured.replay()
        return self._compare(found[-1], queries, contract)

    def _compare(self, out: torch.Tensor, queries: Sequence[torch.Tensor], contract: str) -> Measurements:
        # Tokens behind the last row belong to none: what is computed for them is unspecified.
        rows = out[: sum(self.batch.query_lens)].split(list(self.batch.query_lens))
        padding = out[sum(self.batch.query_lens) : self.batch.num_tokens - self.batch.tail]
        padding = padding if self.ended is None else torch.cat([padding, rows[self.ended]])
        expect(
            bool((padding == 0).all()),
            contract="padding rows attend to nothing",
            expected="output 0",
            got=padding.abs().max().item() if padding.numel() else "",
        )
        healthy = [request for request in range(len(queries)) if request not in (self.fixture.sick, self.ended)]
        if not healthy:
            return {}
        found, own = torch.cat([rows[request] for request in healthy]), [queries[request] for request in healthy]
        if self.batch.trees:
            return self.fixture.expect_trees(found, self.batch, own, contract=contract, requests=healthy)
        lens = [self.seq_lens[request] for request in healthy]
        return self.fixture.assert_within_budget(found, lens, own, contract=contract, requests=healthy)

"""The paged fixture: requests with known keys and values for one backend, in a cache that is poisoned elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from attn_backends import FP8_DS_MLA, KVCache, cache_layout
from builders import AttentionBatch, AttentionKind, BatchBuffers, MetadataBuilder, RequestTables, advance_state
from builders.batch import NO_SLOT
from builders.spec import AttentionSpec
from spec_decode.graphs import runtime_for
from spec_decode.testing import oracle
from spec_decode.testing.batches import MAX_SEQ_LEN, Batch, Case
from spec_decode.testing.layouts import layout_of
from spec_decode.testing.metadata_fields import changed_since, copies_of
from spec_decode.testing.outcome import CheckFailure, Measurements, Unsupported, expect
from spec_decode.testing.poison import bits
from spec_decode.testing.subject import Subject

_TOKENS_OF_A_ROW = 64
"""Maximum number of query tokens per row."""


class PagedFixture:
    """Tables, a poisoned cache, and the logical keys and values of up to `rows` requests of max_seq_len tokens each.

    Every page is NaN until a token is stored there, so a read outside a request's prefix shows in the output, and a
    write outside its slots shows in the cache.

    sick: a request whose prefix stays NaN and infinite, and whose queries are infinite; its outputs are not compared.
    slices: whether query, key and value are slices of a projection.
    """

    def __init__(
        self,
        subject: Subject,
        spec: AttentionSpec,
        rows: int,
        *,
        limits: Sequence[int] | None = None,
        max_seq_len: int = MAX_SEQ_LEN,
        pool: int = 0,
    ) -> None:
        """limits: token limit of each request. pool: pages of the cache, if more than the requests need; they use the
        last ones. Raises Unsupported if the backend rejects the spec."""
        subject.require_supported(spec)
        self.subject, self.spec, self.rows = subject, spec, rows
        self.device = subject.device
        self.generator = torch.Generator().manual_seed(0)
        self.max_seq_len = max_seq_len
        self.max_tokens = rows * _TOKENS_OF_A_ROW
        self.shared_tokens = 0
        self.sick: int | None = None
        self.slices = True
        per_request = -(-max_seq_len // spec.page_size)
        needed = rows * per_request + 3
        self.num_pages = max(pool, needed)
        order = (torch.randperm(needed, generator=self.generator) + (self.num_pages - needed)).tolist()
        self.pages = [order[r * per_request : (r + 1) * per_request] for r in range(rows)]
        self.tables = self._tables(width=1)
        self.limits = list(limits) if limits is not None else [max_seq_len] * rows
        self.layout = layout_of(spec)
        self.key = [self._random(spec.head_dim) for _ in range(rows)]
        self.value = [self._value_of(key) for key in self.key]
        self.sinks = torch.randn(spec.num_q_heads, generator=self.generator) if spec.sinks else None
        self.device_sinks = None if self.sinks is None else self.sinks.to(self.device)
        self.cache = subject.backend.allocate_kv(spec, self.num_pages, self.device)
        self.poison()

    @classmethod
    def of(cls, subject: Subject, case: Case) -> PagedFixture:
        """Make the fixture of a case, for its rows, limit, pool, table and sick request. Raises as `PagedFixture`."""
        fixture = cls(subject, case.spec, case.batch.rows, max_seq_len=case.max_seq_len, pool=case.pool)
        fixture.tables = fixture._tables(case.width)
        fixture.max_tokens = max(fixture.max_tokens, case.batch.num_tokens)
        fixture.sick = case.sick
        return fixture

    def _tables(self, width: int) -> RequestTables:
        """Make tables that are `width` times as wide as the longest request needs."""
        return RequestTables(
            page_sizes=[self.spec.page_size],
            num_pages=[self.num_pages],
            max_reqs=self.rows,
            max_seq_len=self.max_seq_len * width,
            device=self.device,
        )

    def _random(self, dim: int) -> torch.Tensor:
        numbers = torch.randn(self.max_seq_len, self.spec.num_kv_heads, dim, generator=self.generator)
        return self.layout.representable(numbers.to(self.spec.new_kv_dtype))

    def _value_of(self, key: torch.Tensor) -> torch.Tensor:
        if self.spec.kind is AttentionKind.MLA:
            return key[..., : self.spec.out_dim]
        return self._random(self.spec.out_dim)

    def poison(self) -> None:
        """Make every element of the cache NaN."""
        self.layout.poison(self.cache)

    def interleave(self) -> None:
        """Change the cache's strides: head by head, with the key and the value of a token next to each other."""
        spec, latent = self.spec, self.cache.latent
        shape = (self.num_pages, spec.num_kv_heads, spec.page_size, 2, spec.head_dim)
        tokens = torch.empty(shape, dtype=spec.cache_dtype, device=self.device).transpose(1, 2)
        key, value = tokens[..., 0, :], tokens[..., 0 if latent else 1, : spec.out_dim]
        self.cache = KVCache(key, value)
        self.poison()

    def share_prefix(self, num_pages: int) -> None:
        """Let every request begin with the first request's first pages and the tokens in them."""
        self.shared_tokens = num_pages * self.spec.page_size
        for request in range(1, self.rows):
            self.pages[request][:num_pages] = self.pages[0][:num_pages]
            for rows in (self.key, self.value):
                rows[request][: self.shared_tokens] = rows[0][: self.shared_tokens]

    def load(self, batch: Batch) -> BatchBuffers:
        """Make fresh shared state for the batch, with the KV of all but its query tokens in the cache."""
        self.load_tables(len(batch.seq_lens))
        buffers = BatchBuffers(self.tables, max_tokens=self.max_tokens)
        self.reload(buffers, batch)
        return buffers

    def load_tables(self, num_live: int) -> None:
        """Give the first `num_live` requests their pages and limits."""
        writable_from = [self.shared_tokens] * num_live
        self.tables.load([self.pages[:num_live]], self.limits[:num_live], writable_from=writable_from)

    def reload(self, buffers: BatchBuffers, batch: Batch) -> None:
        """Load another batch into the same buffers."""
        buffers.load(batch.query_lens, batch.seq_lens, pad_reqs=batch.rows)
        buffers.tree_masks[: batch.num_tokens].copy_(torch.tensor(batch.tree_masks()))
        for request, (query, length) in enumerate(zip(batch.query_lens, batch.seq_lens, strict=True)):
            self.put_prefix(request, length - query)
            if batch.trees:
                depths = torch.tensor([len(path) - 1 for path in batch.paths(request)])
                at = sum(batch.query_lens[:request])
                buffers.positions[at : at + query].copy_(length - query + depths)

    def replace_batch(self, buffers: BatchBuffers, batch: Batch) -> None:
        """Poison the cache, then load another batch and its tables into the same buffers."""
        self.poison()
        self.load_tables(len(batch.seq_lens))
        self.reload(buffers, batch)

    def exchange_tails(self) -> None:
        """Keep each request's first page, and give it the remaining pages of the next request."""
        tails = [pages[1:] for pages in self.pages]
        self.pages = [pages[:1] + tail for pages, tail in zip(self.pages, tails[1:] + tails[:1], strict=True)]

    def reorder(self, order: Sequence[int]) -> None:
        """Reorder the first requests by `order`, with their pages, keys and values."""
        rest = slice(len(order), None)
        self.pages = [self.pages[i] for i in order] + self.pages[rest]
        self.key = [self.key[i] for i in order] + self.key[rest]
        self.value = [self.value[i] for i in order] + self.value[rest]

    def put_prefix(self, request: int, length: int) -> None:
        """Store a request's first tokens; of a sick one nothing in the first half, and infinity in the second."""
        if request != self.sick:
            self.put(request, range(length))
        elif cache_layout(self.spec) is not FP8_DS_MLA:
            infinite = torch.full((1,), torch.inf)
            self._put(
                request,
                range(length // 2, length),
                infinite.expand_as(self.key[request]),
                infinite.expand_as(self.value[request]),
            )

    def put(self, request: int, positions: range) -> None:
        """Store logical tokens in the cache at the places the page table gives them."""
        self._put(request, positions, self.key[request], self.value[request])

    def _put(self, request: int, positions: range, key: torch.Tensor, value: torch.Tensor) -> None:
        places = [divmod(position, self.spec.page_size) for position in positions]
        pages = torch.tensor([self.pages[request][page] for page, _ in places], dtype=torch.int64)
        offsets = torch.tensor([offset for _, offset in places], dtype=torch.int64)
        tokens = slice(positions.start, positions.stop)
        self.layout.put(self.cache, pages, offsets, key[tokens], value[tokens])

    def builder(self) -> MetadataBuilder[Any]:
        """A fresh builder."""
        return self.subject.backend.builder(
            self.spec,
            self.device,
            max_reqs=self.rows,
            max_tokens=self.max_tokens,
            max_seq_len=self.max_seq_len,
        )

    def view(
        self,
        buffers: BatchBuffers,
        batch: Batch,
        seq_lens: Sequence[int] | None = None,
        *,
        max_seq_len: int | None = None,
    ) -> AttentionBatch:
        """Return what a builder sees. seq_lens: the current lengths, if they are no longer the batch's. max_seq_len: a
        bound on them; None for the fixture's."""
        lens = list(batch.seq_lens if seq_lens is None else seq_lens)
        view = buffers.view(
            0,
            num_reqs=batch.rows,
            num_tokens=batch.num_tokens,
            max_query_len=max(batch.query_lens),
            max_seq_len=self.max_seq_len if max_seq_len is None else max_seq_len,
            uniform=batch.uniform,
            host_seq_lens=lens + [0] * (batch.rows - len(lens)),
            host_seq_lens_exact=True,
        )
        return buffers.tree_view(view) if batch.trees else view

    def build(self, batch: Batch, *, horizon: int = 0, max_seq_len: int | None = None) -> BuiltBatch:
        """Load the batch and build its metadata with a fresh builder. max_seq_len: as in `view`."""
        return BuiltBatch(self, batch, horizon=horizon, max_seq_len=max_seq_len)

    def queries(self, batch: Batch) -> list[torch.Tensor]:
        """Draw a query for each live request, [q, num_q_heads, head_dim] in the spec's dtype, on the CPU."""
        shape = (self.spec.num_q_heads, self.spec.head_dim)
        drawn = [torch.randn(q, *shape, generator=self.generator).to(self.spec.dtype) for q in batch.query_lens]
        if self.sick is not None and self.sick < len(drawn):
            drawn[self.sick].fill_(torch.inf)
        return drawn

    def attend(
        self, metadata: Any, batch: Batch, seq_lens: Sequence[int], queries: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """Write the query tokens' KV through the backend and attend; output [num_tokens, num_q_heads, value_dim]."""
        query, key, value = self.inputs(batch, seq_lens, queries)
        self.subject.backend.write_kv(key, value, self.cache, metadata)
        return self.forward(query, metadata)

    def forward(self, query: torch.Tensor, metadata: Any) -> torch.Tensor:
        """Run the backend's attention of query [num_tokens, num_q_heads, head_dim] over the current cache.

        Raises Unsupported if no attention uses the builder's metadata, and CheckFailure for an output of another shape
        or dtype.
        """
        if why := self.subject.no_attention:
            raise Unsupported(f"no attention to check: {why}")
        out: object = self.subject.backend.forward(query, self.cache, metadata, spec=self.spec, sinks=self.device_sinks)
        shape = (*query.shape[:2], self.spec.out_dim)
        if isinstance(out, torch.Tensor) and out.shape == shape and out.dtype is query.dtype:
            return out
        raise CheckFailure(
            contract="forward() returns [num_tokens, num_q_heads, value_dim] in the dtype of the query",
            expected=f"{list(shape)} in {query.dtype}",
            got=f"{list(out.shape)} in {out.dtype}" if isinstance(out, torch.Tensor) else f"a {type(out).__name__}",
        )

    def inputs(
        self, batch: Batch, seq_lens: Sequence[int], queries: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return flat query, key and value [num_tokens, heads, dim] of the query tokens, on the device.

        Padding tokens hold large numbers, so writing one is noticed.
        """
        ends = list(zip(batch.query_lens, seq_lens, strict=True))
        flat = [
            torch.cat([rows[r][length - q : length] for r, (q, length) in enumerate(ends)])
            for rows in (self.key, self.value)
        ]
        query, key, value = (_padded(t, batch.num_tokens).to(self.device) for t in (torch.cat(list(queries)), *flat))
        if not self.slices:
            return query, key, value
        return _as_projection_slice(query), _as_projection_slice(key), _as_projection_slice(value)

    def assert_within_budget(
        self,
        out: torch.Tensor,
        seq_lens: Sequence[int],
        queries: Sequence[torch.Tensor],
        *,
        contract: str,
        requests: Sequence[int] | None = None,
    ) -> Measurements:
        """Compare out [>= query tokens, num_q_heads, value_dim] of these requests, None for the first ones, with the
        oracle. Raises CheckFailure if its error exceeds twice that of a correct kernel of this precision."""
        own = range(len(seq_lens)) if requests is None else requests
        keys, values = ([rows[request] for request in own] for rows in (self.key, self.value))
        logical = oracle.LogicalBatch(queries, keys, values, seq_lens, self.sinks)
        return oracle.assert_within_budget(
            out, logical, self.spec, self.subject.backend.capabilities, contract=contract
        )

    def expect_trees(
        self,
        out: torch.Tensor,
        batch: Batch,
        queries: Sequence[torch.Tensor],
        *,
        contract: str,
        requests: Sequence[int] | None = None,
    ) -> Measurements:
        """Compare out [>= query tokens, num_q_heads, value_dim] of these requests of the batch, None for all, with the
        oracle, which sees each query token of a tree as a separate text: the cached prefix and the path to the token.
        Raises CheckFailure."""
        alone: list[torch.Tensor] = []
        rows: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        own = range(len(queries)) if requests is None else requests
        for request, query in zip(own, queries, strict=True):
            cached = batch.seq_lens[request] - batch.query_lens[request]
            for path in batch.paths(request):
                alone.append(query[path[-1] : path[-1] + 1])
                places = [cached + token for token in path]
                for found, source in zip(rows, (self.key, self.value), strict=True):
                    found.append(torch.cat([source[request][:cached], source[request][places]]))
        lengths = [len(key) for key in rows[0]]
        logical = oracle.LogicalBatch(alone, *rows, lengths, self.sinks)
        return oracle.assert_within_budget(
            out, logical, self.spec, self.subject.backend.capabilities, contract=contract
        )

    def stored(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return key [slots, num_kv_heads, head_dim] and value [..., value_dim] of every slot, fp32 on the CPU."""
        slots = [divmod(slot, self.spec.page_size) for slot in range(self.num_pages * self.spec.page_size)]
        taken = [self.layout.take(self.cache, page, offset) for page, offset in slots]
        return torch.stack([key.float() for key, _ in taken]), torch.stack([value.float() for _, value in taken])

    def expect_cache(self, lengths: Sequence[int], *, contract: str) -> None:
        """Raise CheckFailure unless the cache holds lengths[r] tokens of each request and poison elsewhere."""
        found = KVCache(bits(self.cache.key).clone(), bits(self.cache.value).clone())
        self.poison()
        for request, length in enumerate(lengths):
            self.put(request, range(length))
        for name, expected, stored in (("key", self.cache.key, found.key), ("value", self.cache.value, found.value)):
            wrong = (bits(expected) != stored).flatten(2).any(-1)
            if wrong.any():
                self._fail_at_slot(wrong, lengths, name, contract)

    def _fail_at_slot(self, wrong: torch.Tensor, lengths: Sequence[int], name: str, contract: str) -> None:
        page, offset = (int(i) for i in wrong.nonzero()[0])
        owner = next((r for r, pages in enumerate(self.pages) if page in pages), None)
        where = f"slot {offset} of page {page} (request {owner})"
        position = 0 if owner is None else self.pages[owner].index(page) * self.spec.page_size + offset
        stray = owner is None or owner >= len(lengths) or position >= lengths[owner]
        expect(
            False,
            contract=contract,
            expected=f"{where} of the {name} cache {'unwritten' if stray else 'holding its token'}",
            got="a write" if stray else "other content or none",
        )


class BuiltBatch:
    """A batch in a paged fixture with its shared state, a builder, its metadata, and the current lengths."""

    def __init__(self, fixture: PagedFixture, batch: Batch, *, horizon: int, max_seq_len: int | None) -> None:
        self.fixture, self.batch = fixture, batch
        self.seq_lens = list(batch.seq_lens)
        self.ended: int | None = None
        self.buffers, self.builder = fixture.load(batch), fixture.builder()
        view = fixture.view(self.buffers, batch, max_seq_len=max_seq_len)
        self.metadata = self.builder.build(view, horizon=horizon)

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


def _padded(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    padding = torch.full((rows - tensor.shape[0], *tensor.shape[1:]), 100.0, dtype=tensor.dtype)
    return torch.cat([tensor, padding])


def _as_projection_slice(tensor: torch.Tensor) -> torch.Tensor:
    """Pass a view into a QKV projection, as a model does."""
    return torch.cat([tensor, torch.full_like(tensor[:, :1], float("nan"))], 1)[:, :-1]

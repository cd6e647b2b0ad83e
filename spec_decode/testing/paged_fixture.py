"""The paged fixture: requests with known keys and values for one backend, in a cache that is poisoned elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from attn_backends import FP8_DS_MLA, KVCache, cache_layout
from builders import AttentionBatch, AttentionKind, BatchBuffers, MetadataBuilder, RequestTables
from builders.spec import AttentionSpec
from spec_decode.testing import oracle
from spec_decode.testing.batches import MAX_SEQ_LEN, Batch, Case
from spec_decode.testing.layouts import Scales, layout_of, scales_of
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
        self.layout, scales = layout_of(spec), scales_of(spec, self.device)
        self.key_scales: Scales = scales.key_floats if scales else ()
        self.value_scales: Scales = scales.value_floats if scales else ()
        self.key = [self._random(spec.head_dim, self.key_scales) for _ in range(rows)]
        self.value = [self._value_of(key) for key in self.key]
        self.sinks = torch.randn(spec.num_q_heads, generator=self.generator) if spec.sinks else None
        self.device_sinks = None if self.sinks is None else self.sinks.to(self.device)
        self.cache = replace(subject.backend.allocate_kv(spec, self.num_pages, self.device), scales=scales)
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

    def _random(self, dim: int, scales: Scales) -> torch.Tensor:
        numbers = torch.randn(self.max_seq_len, self.spec.num_kv_heads, dim, generator=self.generator)
        return self.layout.representable(numbers.to(self.spec.new_kv_dtype), scales)

    def _value_of(self, key: torch.Tensor) -> torch.Tensor:
        if self.spec.kind is AttentionKind.MLA:
            return key[..., : self.spec.out_dim]
        return self._random(self.spec.out_dim, self.value_scales)

    def poison(self) -> None:
        """Make every element of the cache NaN."""
        self.layout.poison(self.cache)

    def interleave(self) -> None:
        """Change the cache's strides: head by head, with the key and the value of a token next to each other."""
        spec, latent = self.spec, self.cache.latent
        shape = (self.num_pages, spec.num_kv_heads, spec.page_size, 2, spec.head_dim)
        tokens = torch.empty(shape, dtype=spec.cache_dtype, device=self.device).transpose(1, 2)
        key, value = tokens[..., 0, :], tokens[..., 0 if latent else 1, : spec.out_dim]
        self.cache = replace(self.cache, key=key, value=value)
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
        keys, values = self._read([self.key[r] for r in own], [self.value[r] for r in own])
        logical = oracle.LogicalBatch(queries, keys, values, seq_lens, self.sinks)
        return oracle.assert_within_budget(
            out, logical, self.spec, self.subject.backend.capabilities, contract=contract
        )

    def _read(
        self, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return what attention reads of written keys and values."""
        read = self.layout.read
        return [read(key, self.key_scales) for key in keys], [read(value, self.value_scales) for value in values]

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
        logical = oracle.LogicalBatch(alone, *self._read(*rows), lengths, self.sinks)
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


def _padded(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    padding = torch.full((rows - tensor.shape[0], *tensor.shape[1:]), 100.0, dtype=tensor.dtype)
    return torch.cat([tensor, padding])


def _as_projection_slice(tensor: torch.Tensor) -> torch.Tensor:
    """Pass a view into a QKV projection, as a model does."""
    return torch.cat([tensor, torch.full_like(tensor[:, :1], float("nan"))], 1)[:, :-1]

"""A small paged world around one backend: requests with known keys and values, in a cache that is poison elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from attn_backends import Capabilities, KVCache
from builders import (
    AttentionBatch,
    AttentionKind,
    BatchBuffers,
    MetadataBuilder,
    RequestTables,
    advance_shared_state,
)
from builders.spec import AttentionSpec
from spec_decode.conformance.cases import MAX_SEQ_LEN, Batch
from spec_decode.conformance.check import Evidence, Subject, expect
from spec_decode.testing import oracle
from spec_decode.testing.layouts import layout_of

_ROUNDING = 32 * torch.finfo(torch.float32).eps
"""What two right kernels may differ by in the order of their fp32 sums, beyond the reference's own error: that of a
score of tens goes through the exponential."""


class PagedFixture:
    """Tables, a poisoned cache and the logical truth for up to `rows` requests of MAX_SEQ_LEN tokens each.

    Every page is NaN until a token is put there, so a read outside a request's prefix shows in the output, and any
    write outside its slots shows in the cache.
    """

    def __init__(
        self,
        subject: Subject,
        spec: AttentionSpec,
        rows: int,
        *,
        seed: int = 0,
        limits: Sequence[int] | None = None,
    ) -> None:
        self.subject, self.spec, self.rows = subject, spec, rows
        self.device = subject.device
        self.generator = torch.Generator().manual_seed(seed)
        per_request = -(-MAX_SEQ_LEN // spec.page_size)
        self.num_pages = rows * per_request + 3
        order = torch.randperm(self.num_pages, generator=self.generator).tolist()
        self.pages = [order[r * per_request : (r + 1) * per_request] for r in range(rows)]
        self.tables = RequestTables(
            page_sizes=[spec.page_size],
            num_pages=[self.num_pages],
            max_reqs=rows,
            max_seq_len=MAX_SEQ_LEN,
            device=self.device,
        )
        self.limits = list(limits) if limits is not None else [MAX_SEQ_LEN] * rows
        self.layout = layout_of(spec)
        self.key = [self._random(spec.head_dim) for _ in range(rows)]
        self.value = [self._value_of(key) for key in self.key]
        self.sinks = torch.randn(spec.num_q_heads, generator=self.generator) if spec.sinks else None
        self.device_sinks = None if self.sinks is None else self.sinks.to(self.device)
        self.cache = subject.backend.allocate_kv(spec, self.num_pages, self.device)
        self.poison()

    def _random(self, dim: int) -> torch.Tensor:
        numbers = torch.randn(MAX_SEQ_LEN, self.spec.num_kv_heads, dim, generator=self.generator)
        return self.layout.representable(numbers.to(self.spec.new_kv_dtype))

    def _value_of(self, key: torch.Tensor) -> torch.Tensor:
        if self.spec.kind is AttentionKind.MLA:
            return key[..., : self.spec.out_dim]
        return self._random(self.spec.out_dim)

    def poison(self) -> None:
        """Make every element of the cache NaN."""
        self.layout.poison(self.cache)

    def load(self, batch: Batch) -> BatchBuffers:
        """Fresh shared state for the batch, with the KV of all but its query tokens in the cache."""
        self.load_tables(len(batch.seq_lens))
        buffers = BatchBuffers(self.tables, max_tokens=self.rows * 32)
        self.reload(buffers, batch)
        return buffers

    def load_tables(self, live: int) -> None:
        self.tables.load([self.pages[:live]], self.limits[:live])

    def reload(self, buffers: BatchBuffers, batch: Batch) -> None:
        """Put another batch into the same buffers."""
        buffers.load(batch.query_lens, batch.seq_lens, pad_reqs=batch.rows)
        for request, (query, length) in enumerate(zip(batch.query_lens, batch.seq_lens, strict=True)):
            self.put(request, range(length - query))

    def put(self, request: int, positions: range) -> None:
        """Place logical tokens in the cache by the page table's own arithmetic."""
        for position in positions:
            page, offset = divmod(position, self.spec.page_size)
            key, value = self.key[request][position], self.value[request][position]
            self.layout.put(self.cache, self.pages[request][page], offset, key, value)

    def builder(self) -> MetadataBuilder[Any]:
        """A fresh builder."""
        return self.subject.backend.builder(
            self.spec, self.device, max_reqs=self.rows, max_tokens=self.rows * 32, max_seq_len=MAX_SEQ_LEN
        )

    def view(self, buffers: BatchBuffers, batch: Batch, seq_lens: Sequence[int] | None = None) -> AttentionBatch:
        """What a builder sees. seq_lens: the lengths by now, where they moved on."""
        lens = list(batch.seq_lens if seq_lens is None else seq_lens)
        padded = batch.query_lens[0] * (batch.rows - len(lens)) if batch.uniform else 0
        return buffers.view(
            0,
            num_reqs=batch.rows,
            num_tokens=sum(batch.query_lens) + padded,
            max_query_len=max(batch.query_lens),
            uniform=batch.uniform,
            host_seq_lens=lens + [0] * (batch.rows - len(lens)),
            host_seq_lens_exact=True,
        )

    def queries(self, batch: Batch) -> list[torch.Tensor]:
        """A fresh query per live request, [q, Hq, D]."""
        shape = (self.spec.num_q_heads, self.spec.head_dim)
        return [torch.randn(q, *shape, generator=self.generator).to(self.spec.dtype) for q in batch.query_lens]

    def attend(
        self,
        metadata: Any,
        batch: Batch,
        seq_lens: Sequence[int],
        queries: Sequence[torch.Tensor],
        *,
        num_tokens: int,
    ) -> torch.Tensor:
        """Write the query tokens' KV through the backend and attend; the live tokens' output."""
        query, key, value = self.inputs(batch, seq_lens, queries, num_tokens)
        self.subject.backend.write_kv(key, value, self.cache, metadata)
        return self.subject.backend.forward(query, self.cache, metadata, spec=self.spec, sinks=self.device_sinks)

    def inputs(
        self, batch: Batch, seq_lens: Sequence[int], queries: Sequence[torch.Tensor], num_tokens: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Flat query, key and value of the query tokens; padding tokens are loud, so that writing one shows."""
        ends = list(zip(batch.query_lens, seq_lens, strict=True))
        flat = [
            torch.cat([rows[r][length - q : length] for r, (q, length) in enumerate(ends)])
            for rows in (self.key, self.value)
        ]
        query, key, value = (_padded(t, num_tokens).to(self.device) for t in (torch.cat(list(queries)), *flat))
        # As a model hands it over: a view into the projection of queries, keys and values.
        packed = torch.cat([query, torch.full_like(query[:, :1], float("nan"))], 1)
        return packed[:, :-1], key, value

    def judge(
        self,
        out: torch.Tensor,
        batch: Batch,
        seq_lens: Sequence[int],
        queries: Sequence[torch.Tensor],
        *,
        contract: str,
    ) -> Evidence:
        """Compare with the oracle, within twice the error of an honest kernel of this precision."""
        live = len(seq_lens)
        able, key, value = self.subject.backend.capabilities, self.key[:live], self.value[:live]
        return judge(able, self.spec, out, queries, key, value, seq_lens, self.sinks, contract=contract)

    def expect_cache(self, lengths: Sequence[int], *, contract: str) -> None:
        """The cache holds exactly the first lengths[r] tokens of each request, and poison everywhere else."""
        found = KVCache(bits(self.cache.key).clone(), bits(self.cache.value).clone())
        self.poison()
        for request, length in enumerate(lengths):
            self.put(request, range(length))
        for name in ("key", "value"):
            wrong = (bits(getattr(self.cache, name)) != getattr(found, name)).flatten(2).any(-1)
            self._expect_no_slot(wrong, lengths, name, contract)

    def _expect_no_slot(self, wrong: torch.Tensor, lengths: Sequence[int], name: str, contract: str) -> None:
        if not wrong.any():
            return
        page, offset = (int(i) for i in wrong.nonzero()[0])
        owner = next((r for r, pages in enumerate(self.pages) if page in pages), None)
        where = f"slot {offset} of page {page} (request {owner})"
        position = 0 if owner is None else self.pages[owner].index(page) * self.spec.page_size + offset
        stray = owner is None or owner >= len(lengths) or position >= lengths[owner]
        expect(
            False,
            contract=contract,
            expected=f"{where} of the {name} cache {'left alone' if stray else 'holding its token'}",
            got="a write" if stray else "another content or none",
        )


def judge(
    able: Capabilities,
    spec: AttentionSpec,
    out: torch.Tensor,
    queries: Sequence[torch.Tensor],
    key: Sequence[torch.Tensor],
    value: Sequence[torch.Tensor],
    seq_lens: Sequence[int],
    sinks: torch.Tensor | None,
    *,
    contract: str,
) -> Evidence:
    """Compare out [>= tokens, Hq, E] with the oracle over these requests' queries, keys and values, all on the CPU.

    The budget is twice the error of an honest kernel of this precision.
    """
    args = (spec, queries, key, value, seq_lens, sinks)
    truth = torch.cat(oracle.attention(*args))
    narrow = able.quantises_queries and spec.cache_dtype.itemsize == 1
    operands = spec.cache_dtype if narrow else spec.dtype
    honest = torch.cat(oracle.attention(*args, dtype=spec.dtype, operands=operands))
    budget = 2 * oracle.relative_error(honest, truth) + _ROUNDING
    error = oracle.relative_error(out[: truth.shape[0]], truth)
    expect(
        error <= budget,
        contract=contract,
        expected=f"attention over the logical prefix of {list(seq_lens)} tokens within {budget:.2e}",
        got=f"relative error {error:.2e} on [{spec.describe()}]",
    )
    return {"error": error, "budget": budget, "error_over_budget": error / budget}


def advance(world: PagedFixture, buffers: BatchBuffers, batch: Batch, builder: Any, metadata: Any) -> None:
    """Move the shared state one token forward and refresh the metadata."""
    advance_shared_state(buffers, batch.rows)
    builder.advance(metadata)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same elements as integers: a poisoned one equals itself."""
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


def _padded(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    loud = torch.full((rows - tensor.shape[0], *tensor.shape[1:]), 100.0, dtype=tensor.dtype)
    return torch.cat([tensor, loud])

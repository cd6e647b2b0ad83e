"""The persistent, device-side state of one batch shape, and the view of it that builders get."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from builders.devices import stage_into, staged
from builders.errors import BatchError, require, require_counts, require_tensor
from builders.spec import MAX_TREE_TOKENS
from builders.tables import RequestTables

NO_SLOT = -1
"""Slot of a token that is not written to the cache."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionBatch:
    """One KV group's view of a batch: slices of persistent buffers, without copies, plus what the host knows.

    query_start_loc  int32 [num_reqs + 1]
    seq_lens         int32 [num_reqs]             KV tokens the request's last query token sees; 0 in padding rows
    positions        int64 [num_tokens]           0 in padding rows
    block_table      int32 [num_reqs, max_pages]  -1 where no page is allocated
    slot_mapping     int64 [num_tokens]           -1 writes nothing

    Kernels do not validate pages: block-table entries up to a row's seq_len must be pages of the cache. `RequestTables`
    and `BatchBuffers` ensure that. If you fill a batch by other means, you must; `check_batch` checks what the host can
    see.
    """

    num_reqs: int
    """Rows, padding included."""
    num_tokens: int
    max_query_len: int
    max_seq_len: int
    """Upper bound on seq_lens for as long as the metadata lives, horizon included."""
    uniform: bool
    """Whether every row, padding included, has exactly max_query_len tokens."""
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    positions: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    host_seq_lens: tuple[int, ...] | None = None
    """Host copy of seq_lens, or upper bounds on them; None if the caller paid for neither."""
    host_seq_lens_exact: bool = False
    host_query_lens: tuple[int, ...] | None = None
    """Query tokens per row, padding included, as known on the host; `BatchBuffers` always sets it."""
    tree_masks: torch.Tensor | None = None
    """int64 [num_tokens] if the queries are trees of at most MAX_TREE_TOKENS tokens; None if they are chains. Bit j of
    a token's mask is set if it sees query token j of its request; every token sees the whole cached prefix. A token's
    position is prefix length + set bits - 1, and its slot is that of prefix length + index. Padding: 0."""
    num_pages: int | None = None
    """Pages of the group's pool, a bound on the ids in block_table; None if the caller does not pass it."""


def check_batch(batch: AttentionBatch, device: torch.device) -> None:
    """Raise BatchError for tensors that a builder's kernels would misread. It reads no contents, so it never syncs.

    Block-table rows can have any stride. positions can be empty if the builder's step_fields do not name it.
    """
    rows, tokens = (batch.num_reqs,), (batch.num_tokens,)
    require_tensor("query_start_loc", batch.query_start_loc, shape=(rows[0] + 1,), dtype=torch.int32, device=device)
    require_tensor("seq_lens", batch.seq_lens, shape=rows, dtype=torch.int32, device=device)
    require_tensor("block_table", batch.block_table, shape=(*rows, None), dtype=torch.int32, device=device)
    require_tensor("slot_mapping", batch.slot_mapping, shape=tokens, dtype=torch.int64, device=device)
    if batch.positions.numel():
        require_tensor("positions", batch.positions, shape=tokens, dtype=torch.int64, device=device)
    vectors = (batch.query_start_loc, batch.seq_lens, batch.slot_mapping, batch.positions)
    require(
        batch.block_table.stride(1) == 1 and all(vector.is_contiguous() for vector in vectors),
        "rows of the block table and all other tensors of a batch must be contiguous, got strides "
        f"{batch.block_table.stride()} and {[vector.stride() for vector in vectors]}; a kernel would read the gaps. "
        "Pass slices of persistent buffers.",
    )
    if batch.tree_masks is not None:
        _check_trees(batch, batch.tree_masks, device)
    require(
        batch.num_tokens == rows[0] * batch.max_query_len or not batch.uniform,
        f"a uniform batch of {rows[0]} rows of {batch.max_query_len} tokens has {rows[0] * batch.max_query_len}, got "
        f"num_tokens={batch.num_tokens}; rows would be misread. Pass uniform=False for rows of different lengths.",
    )


def _check_trees(batch: AttentionBatch, masks: torch.Tensor, device: torch.device) -> None:
    require_tensor("tree_masks", masks, shape=(batch.num_tokens,), dtype=torch.int64, device=device)
    require(
        batch.max_query_len <= MAX_TREE_TOKENS and masks.is_contiguous(),
        f"a request's tree must have at most {MAX_TREE_TOKENS} query tokens and contiguous masks, got "
        f"{batch.max_query_len} and strides {masks.stride()}; a token's ancestors are the bits of one word. Drop the "
        "least probable paths.",
    )


class BatchBuffers:
    """Persistent buffers for one kind of batch, at fixed addresses, with a padding rule per field.

    query_start_loc  int32 [max_reqs + 1]             uniform: row * query_len, padding too; ragged: repeats the end
    seq_lens         int32 [max_reqs]                 padding rows 0
    positions        int64 [max_tokens]               padding 0
    slot_mappings    int64 [num_groups, max_tokens]   padding -1
    tree_masks       int64 [max_tokens]               padding 0; exposed by tree_view
    step             int64 [1]                        draft column being produced; incremented by the advance
    """

    def __init__(self, tables: RequestTables, *, max_tokens: int) -> None:
        device = tables.device
        self.tables = tables
        self.max_reqs = tables.max_reqs
        self.max_tokens = max_tokens
        self.query_start_loc = torch.zeros(self.max_reqs + 1, dtype=torch.int32, device=device)
        self.seq_lens = torch.zeros(self.max_reqs, dtype=torch.int32, device=device)
        self.positions = torch.zeros(max_tokens, dtype=torch.int64, device=device)
        self.slot_mappings = torch.full((tables.num_groups, max_tokens), NO_SLOT, dtype=torch.int64, device=device)
        self.tree_masks = torch.zeros(max_tokens, dtype=torch.int64, device=device)
        self.step = torch.zeros(1, dtype=torch.int64, device=device)
        self._query_lens = (0,) * self.max_reqs

    def set_uniform(self, query_len: int) -> None:
        """Give every row query_len tokens. Fields that depend on lengths are filled in on the device."""
        self.query_start_loc.copy_(torch.arange(self.max_reqs + 1, dtype=torch.int32) * query_len)
        self._query_lens = (query_len,) * self.max_reqs

    def clear(self) -> None:
        """Make every row padding."""
        self.seq_lens.zero_()
        self.positions.zero_()
        self.slot_mappings.fill_(NO_SLOT)
        self.tree_masks.zero_()
        self.step.zero_()

    def load(
        self, query_lens: Sequence[int], seq_lens: Sequence[int], *, pad_reqs: int | None = None
    ) -> tuple[int, int]:
        """Write a batch known on the host: row r queries the last query_lens[r] of its seq_lens[r] tokens. Zeros
        tree_masks.

        pad_reqs: pad to this many rows; a uniform batch stays uniform, so its padding rows get query_len tokens each.
        Returns (num_reqs, num_tokens), padding included. Raises BatchError, and writes nothing, for an empty batch or
        one beyond the buffers, a row without tokens, a query longer than its sequence, queries before a row's writable
        positions, or lengths beyond a token limit.
        """
        lens, seqs = list(query_lens), list(seq_lens)
        num_reqs = len(lens) if pad_reqs is None else pad_reqs
        self._check(lens, seqs, num_reqs)
        uniform = len(set(lens)) == 1
        padded = lens + [lens[0] if uniform else 0] * (num_reqs - len(lens))
        num_tokens = sum(padded)
        require(
            num_tokens <= self.max_tokens,
            f"these buffers hold {self.max_tokens} query tokens, the padded batch has {num_tokens}. "
            "Use larger buffers or a smaller batch.",
        )
        self._write(lens, seqs, padded)
        return num_reqs, num_tokens

    def _check(self, lens: list[int], seqs: list[int], num_reqs: int) -> None:
        limits = self.tables.limits_host
        require_counts("a batch's query and sequence lengths", [*lens, *seqs])
        require(
            0 < len(lens) == len(seqs) <= num_reqs <= self.max_reqs and len(lens) <= len(limits),
            f"a batch has 1 to {min(self.max_reqs, len(limits))} requests, each with a query and a sequence length, "
            f"got {len(lens)} and {len(seqs)} padded to {num_reqs}. Load the requests' tables first and pass one of "
            "each per request.",
        )
        for request, (query, seq) in enumerate(zip(lens, seqs, strict=True)):
            require(
                1 <= query <= seq,
                f"request {request} needs 1 <= query length <= sequence length, got {query} and {seq}; the "
                "query tokens are the last ones of the sequence. Count them in both, and leave empty requests out.",
            )
            start = self.tables.writable_host[request]
            require(
                seq - query >= start,
                f"request {request} can write from position {start} on, got queries from position {seq - query}; they "
                "would overwrite a shared prefix. Query only uncached tokens.",
            )
            require(
                seq <= limits[request],
                f"request {request} can hold {limits[request]} tokens, got a sequence of {seq}; it would write outside "
                "its pages. Allocate pages and raise its limit, or finish the request.",
            )

    def _write(self, lens: list[int], seqs: list[int], padded: list[int]) -> None:
        starts = torch.tensor([0, *padded]).cumsum(0)
        query, seq = torch.tensor(lens), torch.tensor(seqs)
        row = torch.repeat_interleave(torch.arange(len(lens)), query)
        positions = torch.arange(len(row)) - starts[row] + (seq - query)[row]
        self.query_start_loc[len(starts) :].fill_(int(starts[-1]))
        self._query_lens = (*padded, *(0,) * (self.max_reqs - len(padded)))
        for buffer in (self.seq_lens, self.positions, self.tree_masks, self.step):
            buffer.zero_()
        for buffer, host in ((self.query_start_loc, starts), (self.seq_lens, seq), (self.positions, positions)):
            stage_into(buffer[: len(host)], host)
        self.slot_mappings.fill_(NO_SLOT)
        # On the device, which has the tables: reading them would wait for all that is enqueued.
        row, positions = staged(row, self.step.device), self.positions[: len(row)]
        for group, size in enumerate(self.tables.page_sizes_host):
            pages = self.tables.block_tables[group][row, positions // size].long()
            self.slot_mappings[group, : len(row)] = pages * size + positions % size

    def require_room(self, num_reqs: int, num_tokens: int) -> None:
        """Raise BatchError for more rows or query tokens than these buffers hold."""
        if not (0 <= num_reqs <= self.max_reqs and 0 <= num_tokens <= self.max_tokens):
            raise BatchError(
                f"these buffers hold {self.max_reqs} rows and {self.max_tokens} query tokens, got {num_reqs} and "
                f"{num_tokens}; a kernel would write past their end. Use larger buffers or a smaller batch."
            )

    def view(
        self,
        group: int,
        *,
        num_reqs: int,
        num_tokens: int,
        max_query_len: int,
        max_seq_len: int | None = None,
        uniform: bool = True,
        host_seq_lens: Sequence[int] | None = None,
        host_seq_lens_exact: bool = False,
    ) -> AttentionBatch:
        """Return this group's view of the first num_reqs rows. max_seq_len: bound on lengths; None takes the tables'.

        Raises BatchError for more rows or tokens than these buffers hold.
        """
        self.require_room(num_reqs, num_tokens)
        return AttentionBatch(
            num_reqs=num_reqs,
            num_tokens=num_tokens,
            max_query_len=max_query_len,
            max_seq_len=self.tables.max_seq_len if max_seq_len is None else max_seq_len,
            uniform=uniform,
            query_start_loc=self.query_start_loc[: num_reqs + 1],
            seq_lens=self.seq_lens[:num_reqs],
            positions=self.positions[:num_tokens],
            block_table=self.tables.block_tables[group, :num_reqs],
            slot_mapping=self.slot_mappings[group, :num_tokens],
            host_seq_lens=None if host_seq_lens is None else tuple(host_seq_lens),
            host_seq_lens_exact=host_seq_lens_exact,
            host_query_lens=self._query_lens[:num_reqs],
            num_pages=self.tables.num_pages[group],
        )

    def tree_view(self, view: AttentionBatch) -> AttentionBatch:
        """Return the same batch with trees as queries, described by tree_masks."""
        return replace(view, tree_masks=self.tree_masks[: view.num_tokens])

"""Metadata of sparse sliding-window attention: for every query token, the cache slots it sees, as a list.

Shape legend: T query tokens, R requests, W window width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from builders.batch import NO_SLOT, AttentionBatch
from builders.contract import AdvanceLevel, AdvanceSupport, CaptureConstants, GraphSupport, MetadataBuilder
from builders.errors import require
from builders.kernels.op_by_schema import define_op_by_schema
from builders.kernels.triton_runtime import await_previous, dependent_launch, tl, triton
from builders.spec import AttentionSpec

_LIST_STEP = 128
"""Lists are as wide as a multiple of this: the widest step that a kernel reading them asks for (FlashMLA)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SparseSwaMetadata:
    """Query token t sees the KV in the slots window_indices[t, : window_lens[t]], in the order of their positions.

    query_start_loc int32 [R + 1], seq_lens int32 [R], positions int64 [T], block_table int32 [R, max_pages],
    slot_mapping int64 [T]: views of the batch.
    window_indices int32 [T, W], window_lens int32 [T], is_valid bool [T]: the builder's persistent buffers. A slot is
    page * page_size + offset, -1 behind the list. A padding token, or one whose request became inert, is not valid and
    has length 0.
    """

    num_reqs: int
    num_tokens: int
    max_query_len: int
    max_seq_len: int
    """A bound on seq_lens, not a length."""
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    positions: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    window_indices: torch.Tensor
    window_lens: torch.Tensor
    is_valid: torch.Tensor


class SparseSwaBuilder(MetadataBuilder[SparseSwaMetadata]):
    """Lists every token's window with one kernel; W is the window rounded up to a multiple of 128.

    Raises BatchError for a spec without a sliding window.
    """

    graph_support = GraphSupport.ALWAYS
    step_fields = ("seq_lens", "positions", "slot_mapping", "window_indices", "window_lens", "is_valid")

    def __init__(
        self, spec: AttentionSpec, device: torch.device, *, max_reqs: int, max_tokens: int, max_seq_len: int
    ) -> None:
        super().__init__(spec, device, max_reqs=max_reqs, max_tokens=max_tokens, max_seq_len=max_seq_len)
        require(
            spec.sliding_window is not None,
            "a list of slots needs a sliding window, got sliding_window=None; a list of all tokens has no bound, so no "
            "builder was made. Give the spec a window or choose a dense backend.",
        )
        assert spec.sliding_window is not None
        self.window = spec.sliding_window
        width = -(-self.window // _LIST_STEP) * _LIST_STEP
        self._indices = torch.full((max_tokens, width), NO_SLOT, dtype=torch.int32, device=device)
        self._lens = torch.zeros(max_tokens, dtype=torch.int32, device=device)
        self._is_valid = torch.zeros(max_tokens, dtype=torch.bool, device=device)

    @classmethod
    def advance_support(cls, spec: AttentionSpec, device: torch.device) -> AdvanceSupport:
        return AdvanceSupport(
            AdvanceLevel.IN_GRAPH, "window lists are recomputed from positions and block table by one kernel"
        )

    def build(self, batch: AttentionBatch, *, horizon: int = 0) -> SparseSwaMetadata:
        self.check_horizon(batch, horizon)
        metadata = SparseSwaMetadata(
            num_reqs=batch.num_reqs,
            num_tokens=batch.num_tokens,
            max_query_len=batch.max_query_len,
            max_seq_len=batch.max_seq_len,
            query_start_loc=batch.query_start_loc,
            seq_lens=batch.seq_lens,
            positions=batch.positions,
            block_table=batch.block_table,
            slot_mapping=batch.slot_mapping,
            window_indices=self._indices[: batch.num_tokens],
            window_lens=self._lens[: batch.num_tokens],
            is_valid=self._is_valid[: batch.num_tokens],
        )
        self.advance(metadata)
        return metadata

    def advance(self, metadata: SparseSwaMetadata) -> None:
        _swa_window_op(
            metadata.window_indices,
            metadata.window_lens,
            metadata.is_valid,
            metadata.positions,
            metadata.seq_lens,
            metadata.query_start_loc,
            metadata.block_table,
            self.window,
            self.spec.page_size,
        )

    def capture_constants(self, metadata: SparseSwaMetadata) -> CaptureConstants:
        return CaptureConstants(
            max_reqs=metadata.num_reqs, max_query_len=metadata.max_query_len, max_seq_len=metadata.max_seq_len
        )


def live_rows(
    query_start_loc: torch.Tensor, seq_lens: torch.Tensor, num_tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Per query token its request's row, int64 [T], and whether that request lives, bool [T]."""
    token = torch.arange(num_tokens, dtype=query_start_loc.dtype, device=query_start_loc.device)
    row = torch.searchsorted(query_start_loc[1:], token, right=True).clamp_(max=seq_lens.shape[0] - 1)
    return row, (seq_lens[row] > 0) & (token < query_start_loc[-1])


def slots_of(
    entries: torch.Tensor, seen: torch.Tensor, row: torch.Tensor, block_table: torch.Tensor, page_size: int
) -> torch.Tensor:
    """The slots of the logical entries [T, N] of requests row [T], -1 where not seen; the table is read where seen."""
    entries = torch.where(seen, entries, 0)
    page = block_table[row[:, None], entries // page_size]
    return torch.where(seen, page * page_size + entries % page_size, NO_SLOT)


def _swa_window(
    window_indices: torch.Tensor,
    window_lens: torch.Tensor,
    is_valid: torch.Tensor,
    positions: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    block_table: torch.Tensor,
    window: int,
    page_size: int,
) -> None:
    tokens, width = window_indices.shape
    row, live = live_rows(query_start_loc, seq_lens, tokens)
    first = (positions - window + 1).clamp_(min=0)
    lens = torch.where(live, positions + 1 - first, 0)
    lane = torch.arange(width)
    window_indices.copy_(slots_of(first[:, None] + lane, lane < lens[:, None], row, block_table, page_size))
    window_lens.copy_(lens)
    is_valid.copy_(live)


def _launch(
    window_indices: torch.Tensor,
    window_lens: torch.Tensor,
    is_valid: torch.Tensor,
    positions: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    block_table: torch.Tensor,
    window: int,
    page_size: int,
) -> None:
    tokens, width = window_indices.shape
    num_reqs = seq_lens.shape[0]
    _swa_window_kernel[(tokens,)](
        window_indices,
        window_lens,
        is_valid,
        positions,
        seq_lens,
        query_start_loc,
        block_table,
        num_reqs,
        block_table.stride(0),
        WINDOW=window,
        PAGE_SIZE=page_size,
        WIDTH=width,
        BLOCK_W=triton.next_power_of_2(width),
        BLOCK_R=triton.next_power_of_2(num_reqs),
        num_warps=1 if width <= 256 else 4,
        **dependent_launch(positions.device),
    )


@triton.jit
def live_row(query_start_loc, seq_lens, token, num_reqs, BLOCK_R: tl.constexpr):
    """The row of the token's request and whether that lives; num_reqs and False behind the last request's tokens."""
    request = tl.arange(0, BLOCK_R)
    ends = tl.load(query_start_loc + 1 + request, mask=request < num_reqs, other=0x7FFFFFFF)
    row = tl.sum((ends <= token).to(tl.int32), 0)
    return row, tl.load(seq_lens + row, mask=row < num_reqs, other=0) > 0


@triton.jit
def load_slots(table_row, entries, seen, PAGE_SIZE: tl.constexpr):
    """The slots of logical entries, -1 where not seen; the table's row is read where seen."""
    page = tl.load(table_row + entries // PAGE_SIZE, mask=seen, other=0)
    return tl.where(seen, page * PAGE_SIZE + entries % PAGE_SIZE, -1)


@triton.jit
def _swa_window_kernel(
    window_indices,
    window_lens,
    is_valid,
    positions,
    seq_lens,
    query_start_loc,
    block_table,
    num_reqs,
    table_stride,
    WINDOW: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PDL: tl.constexpr,
):
    await_previous(PDL)
    token = tl.program_id(0).to(tl.int64)
    row, live = live_row(query_start_loc, seq_lens, token, num_reqs, BLOCK_R)
    position = tl.load(positions + token).to(tl.int32)
    first = tl.maximum(position - WINDOW + 1, 0)
    length = tl.where(live, position + 1 - first, 0)
    lane = tl.arange(0, BLOCK_W)
    slots = load_slots(block_table + row.to(tl.int64) * table_stride, first + lane, lane < length, PAGE_SIZE)
    tl.store(window_indices + token * WIDTH + lane, slots, mask=lane < WIDTH)
    tl.store(window_lens + token, length)
    tl.store(is_valid + token, live)


_swa_window_op = define_op_by_schema(
    "builders::swa_window",
    "(Tensor(a!) window_indices, Tensor(b!) window_lens, Tensor(c!) is_valid, Tensor positions, Tensor seq_lens, "
    "Tensor query_start_loc, Tensor block_table, int window, int page_size) -> ()",
    cpu=_swa_window,
    cuda=_launch,
)

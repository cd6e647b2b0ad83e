"""Stands in for an engine with builders of vLLM's shape. Nothing here knows about the contract."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass
class EngineConfig:
    """The part of the engine's configuration that a builder reads."""

    max_num_seqs: int
    max_model_len: int


@dataclass
class KVCacheSpec:
    block_size: int


@dataclass
class CommonAttentionMetadata:
    """A batch as the engine passes it to every builder, including padding rows."""

    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    block_table_tensor: torch.Tensor
    slot_mapping: torch.Tensor


@dataclass
class PagedMetadata:
    """The kernel's input: row r's pages are kv_indices[kv_indptr[r] : kv_indptr[r + 1]], and its last page holds
    last_page_len[r] tokens."""

    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor
    last_page_len: torch.Tensor


class PagedMetadataBuilder:
    """Keeps its lists in persistent buffers and can update them without a build."""

    supports_draft_decode_metadata_update = True

    def __init__(
        self, kv_cache_spec: KVCacheSpec, layer_names: Sequence[str], config: EngineConfig, device: torch.device
    ) -> None:
        self.block_size = kv_cache_spec.block_size
        rows, pages = config.max_num_seqs, -(-config.max_model_len // self.block_size)
        self.kv_indptr = torch.zeros(rows + 1, dtype=torch.int32, device=device)
        self.kv_indices = torch.zeros(rows * pages, dtype=torch.int32, device=device)
        self.last_page_len = torch.zeros(rows, dtype=torch.int32, device=device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> PagedMetadata:
        rows = common_attn_metadata.num_reqs
        metadata = PagedMetadata(
            query_start_loc=common_attn_metadata.query_start_loc,
            seq_lens=common_attn_metadata.seq_lens,
            block_table=common_attn_metadata.block_table_tensor,
            slot_mapping=common_attn_metadata.slot_mapping,
            kv_indptr=self.kv_indptr[: rows + 1],
            kv_indices=self.kv_indices,
            last_page_len=self.last_page_len[:rows],
        )
        self._list_pages(metadata)
        return metadata

    def update_draft_decode_metadata(self, metadata: PagedMetadata) -> None:
        """Update the lists in place after seq_lens changed on the device."""
        self._list_pages(metadata)

    def _list_pages(self, metadata: PagedMetadata) -> None:
        size, indptr, indices = self.block_size, metadata.kv_indptr, metadata.kv_indices
        pages = (metadata.seq_lens + size - 1) // size
        indptr[1:].copy_(pages.cumsum(0))
        place = torch.arange(indices.shape[0], dtype=indptr.dtype, device=indptr.device)
        row = torch.searchsorted(indptr[1:], place, right=True).clamp(max=pages.shape[0] - 1)
        column = (place - indptr[row]).clamp(max=metadata.block_table.shape[1] - 1)
        indices.copy_(torch.where(place < indptr[-1], metadata.block_table[row, column], 0))
        metadata.last_page_len.copy_(metadata.seq_lens - (pages - 1).clamp(min=0) * size)


class DriftingMetadataBuilder(PagedMetadataBuilder):
    """The same with a cheaper update, which is right until a request fills its last page."""

    def update_draft_decode_metadata(self, metadata: PagedMetadata) -> None:
        metadata.last_page_len.add_(metadata.seq_lens > 0)


def paged_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, metadata: PagedMetadata, scale: float, max_pages: int
) -> torch.Tensor:
    """The engine's kernel. query: [T, Hq, D]; key and value: [pages, size, Hkv, D]; returns [T, Hq, D]."""
    size, heads = key.shape[1:3]
    starts, indptr = metadata.query_start_loc, metadata.kv_indptr
    token = torch.arange(query.shape[0], dtype=starts.dtype, device=query.device)
    row = torch.searchsorted(starts[1:], token, right=True).clamp(max=starts.shape[0] - 2)
    pages = indptr[row + 1] - indptr[row]
    length = (pages - 1) * size + metadata.last_page_len[row]
    place = torch.arange(max_pages * size, device=query.device)
    seen = (place <= (length - starts[row + 1] + token)[:, None]) & (pages > 0)[:, None] & (token < starts[-1])[:, None]
    listed = (indptr[row][:, None] + place[::size] // size).clamp(max=metadata.kv_indices.shape[0] - 1)
    page = metadata.kv_indices[listed].long()
    keys, values = (torch.where(seen[..., None, None], part[page].flatten(1, 2).float(), 0) for part in (key, value))
    grouped = query.float().unflatten(1, (heads, -1))
    scores = torch.einsum("thgd,tlhd->thgl", grouped, keys) * scale
    unseen = ~seen[:, None, None]
    weights = scores.masked_fill(unseen, -torch.inf).softmax(-1).masked_fill(unseen, 0)
    return torch.einsum("thgl,tlhd->thgd", weights, values).flatten(1, 2).to(query.dtype)

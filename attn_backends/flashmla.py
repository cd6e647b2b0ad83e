"""FlashMLA's dense decode on Hopper, from any package with it: DeepSeek's latent attention in absorbed form."""

from __future__ import annotations

import torch
from torch import Tensor

from attn_backends.base import AttentionBackend, Sinks, check_forward_inputs
from attn_backends.capabilities import Capabilities, Feature, FusedWrite, Sizes
from attn_backends.flashmla_package import DENSE, flashmla_version, load_flashmla
from attn_backends.fused_writes import FusedLatentWrite
from attn_backends.kv_cache import KVCache
from builders import AttentionKind, AttentionSpec
from builders.flashmla import FlashMlaBuilder, FlashMlaMetadata

flashmla = load_flashmla(DENSE)

_LATENT, _ROTARY = 512, 64


class FlashMla(FusedLatentWrite, AttentionBackend):
    """Latents of 512 dims plus 64 rotary ones, in pages of 64 tokens; tiles of 64 rows take any number of heads.

    One call serves uniform rows of a few query tokens, as in drafting and verification. Other batches, such as prompts,
    take one call per row and 128 of its tokens.
    """

    name = "flashmla"
    version = flashmla_version(flashmla)
    contract_version = (1, 2)
    builder = FlashMlaBuilder
    capabilities = Capabilities(
        devices=("cuda",),
        dtypes=(torch.bfloat16,),
        head_dims=Sizes(minimum=_LATENT + _ROTARY, maximum=_LATENT + _ROTARY),
        value_dims=Sizes(minimum=_LATENT, maximum=_LATENT),
        page_sizes=Sizes(minimum=64, maximum=64),
        features=frozenset({Feature.GQA, Feature.VALUE_DIM, Feature.NON_CAUSAL}),
        fused_writes=frozenset({FusedWrite.KV_A_NORM_ROPE}),
        required=frozenset({Feature.VALUE_DIM}),
        kinds=(AttentionKind.MLA,),
        compute_capability=(9, 0),
        one_major_version=True,
    )

    def forward(
        self, query: Tensor, cache: KVCache, metadata: FlashMlaMetadata, *, spec: AttentionSpec, sinks: Sinks = None
    ) -> Tensor:
        check_forward_inputs(query, cache, metadata, spec, sinks)
        query, table, lens = query.contiguous(), metadata.block_table, metadata.kv_lens
        if not metadata.chunks:
            rows = query.unflatten(0, (metadata.num_reqs, metadata.max_query_len))
            return _attend(rows, cache, table, lens, spec).flatten(0, 1)
        out = query.new_zeros(*query.shape[:2], spec.out_dim)
        for i, (row, start, end, _) in enumerate(metadata.chunks):
            row_table, chunk_len = table[row : row + 1], lens[i : i + 1]
            out[start:end] = _attend(query[None, start:end], cache, row_table, chunk_len, spec)[0]
        return out


def _attend(query: Tensor, cache: KVCache, block_table: Tensor, kv_lens: Tensor, spec: AttentionSpec) -> Tensor:
    """query [rows, tokens per row, num_q_heads, head_dim]; returns [..., value_dim]."""
    out: Tensor = flashmla.flash_mla_with_kvcache(
        q=query,
        k_cache=cache.key,
        block_table=block_table,
        cache_seqlens=kv_lens,
        head_dim_v=spec.out_dim,
        # A new object, so that the call makes its schedule on the device: an old one would drop tokens, or read others.
        tile_scheduler_metadata=flashmla.FlashMLASchedMeta(),
        softmax_scale=spec.softmax_scale,
        causal=spec.causal,
    )[0]
    return out

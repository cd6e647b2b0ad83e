"""attn-backends' dense latent attention in vLLM: projections, prefill and cache stay vLLM's, decode is replaced."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any, ClassVar

import torch

import attn_backends
from attn_backends.engines.vllm.backend import OurBackend, OurBuilder, classes_over
from attn_backends.engines.vllm.batch import check_causality
from attn_backends.engines.vllm.compat import (
    AttentionCGSupport,
    AttentionType,
    CommonAttentionMetadata,
    MLACommonBackend,
    MLACommonImpl,
    MLACommonMetadata,
    MLACommonMetadataBuilder,
    QueryLenSupport,
)
from attn_backends.engines.vllm.kv_views import latents
from attn_backends.engines.vllm.reasons import CUDA, cache_reasons, page_sizes, require_served
from builders import AttentionBatch, AttentionKind, AttentionSpec

_EXTRAS = ("alibi_slopes", "sliding_window", "logits_soft_cap", "attn_type", "q_pad_num_heads")
"""Options of a vLLM layer that a spec for latents does not have."""


class LatentBuilder(OurBuilder, MLACommonMetadataBuilder[MLACommonMetadata]):
    """vLLM's metadata, with this library's in its decode part: an update refreshes the latter."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    query_len_support: ClassVar[QueryLenSupport] = QueryLenSupport.UNIFORM
    supports_non_causal_multi_token_decode: ClassVar[bool] = True

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        dims, dtype = self.mla_dims, self.model_config.dtype
        spec = latent_spec(self.num_heads, dims.kv_lora_rank, dims.qk_rope_head_dim, self.page_size, dtype)
        reasons = ["decode context parallelism is on"] if self.dcp_world_size > 1 else []
        self.make_inner(spec, device, vllm_config, reasons)
        # By query length and row: padding rows of a graph have tokens, as all others do.
        lens = torch.arange(1, self.reorder_batch_threshold + 1, dtype=torch.int32, device=device)
        rows = torch.arange(vllm_config.scheduler_config.max_num_seqs + 1, dtype=torch.int32, device=device)
        self.starts = lens[:, None] * rows

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> Any:
        """See vLLM, which treats causality given as a tensor as True. Raises BatchError as `check_causality` does."""
        check_causality(common_attn_metadata, serves_blocks=self.serves_blocks, sliding_window=None)
        self._causal = common_attn_metadata.causal
        return super().build(common_prefix_len, common_attn_metadata, fast_build)

    def update_draft_decode_metadata(self, metadata: Any) -> None:
        """Refresh from vLLM's current lengths. Raises nothing that build() has not raised before."""
        self.inner[metadata.causal].advance(metadata.decode.paged)

    def _build_decode(
        self,
        block_table_tensor: torch.Tensor,
        seq_lens_device: torch.Tensor,
        max_seq_len: int,
        query_start_loc_cpu: torch.Tensor,
        query_start_loc_device: torch.Tensor,
        num_decode_tokens: int,
        *rest: Any,
        **more: Any,
    ) -> Any:
        args = (block_table_tensor, seq_lens_device, max_seq_len, query_start_loc_cpu, query_start_loc_device)
        decode = super()._build_decode(*args, num_decode_tokens, *rest, **more)
        rows = len(seq_lens_device)
        query_len = num_decode_tokens // rows
        empty = block_table_tensor.new_empty(0, dtype=torch.int64)
        batch = AttentionBatch(
            num_reqs=rows,
            num_tokens=num_decode_tokens,
            max_query_len=query_len,
            max_seq_len=self.max_seq_len,
            uniform=True,
            query_start_loc=self.starts[query_len - 1, : rows + 1],
            seq_lens=seq_lens_device,
            positions=empty,
            block_table=block_table_tensor,
            slot_mapping=empty,
        )
        decode.paged = self.inner[self._causal].build(batch)
        return decode


class LatentImpl(MLACommonImpl[MLACommonMetadata]):
    """A layer that decodes with `ours`. It returns no logsumexp, so its output cannot be combined with another one, and
    it supports no kind of context parallelism."""

    ours: ClassVar[attn_backends.AttentionBackend]
    can_return_lse_for_decode = supports_dcp = supports_pcp = False

    def __init__(self, **layer: Any) -> None:
        """See vLLM, which passes a layer's options by name. Raises ValueError for a layer that `ours` cannot serve."""
        super().__init__(**layer)
        sizes = (self.num_heads, self.kv_lora_rank, self.qk_rope_head_dim, page_sizes(self.ours)[0])
        spec = latent_spec(*sizes, torch.get_default_dtype(), self.scale)
        extras = {name: layer.get(name) or None for name in _EXTRAS}
        if extras["attn_type"] == AttentionType.DECODER:
            del extras["attn_type"]
        if extras["q_pad_num_heads"] == self.num_heads:
            del extras["q_pad_num_heads"]
        require_served(self.ours, spec, extras)
        self.spec = cache(lambda page_size, causal: replace(spec, page_size=page_size, causal=causal))

    def forward_mqa(
        self, q: Any, kv_c_and_k_pe_cache: torch.Tensor, attn_metadata: Any, layer: Any
    ) -> tuple[torch.Tensor, None]:
        """See vLLM. Raises BatchError for a cache of unknown layout."""
        query = torch.cat(q, -1) if isinstance(q, tuple) else q
        spec = self.spec(kv_c_and_k_pe_cache.shape[1], attn_metadata.causal)
        store = latents(kv_c_and_k_pe_cache, spec.head_dim, spec.out_dim)
        return self.ours.forward(query, store, attn_metadata.decode.paged, spec=spec), None


def latent_spec(
    num_heads: int, rank: int, rope_dim: int, page_size: int, dtype: torch.dtype, scale: float | None = None
) -> AttentionSpec:
    """Return the spec of latents with rank + rope_dim dims, the first `rank` of them the values."""
    return AttentionSpec(
        kind=AttentionKind.MLA,
        num_q_heads=num_heads,
        num_kv_heads=1,
        head_dim=rank + rope_dim,
        value_dim=rank,
        page_size=page_size,
        dtype=dtype,
        scale=scale,
    )


class LatentBackend(OurBackend, MLACommonBackend):
    """vLLM's interface for backends over latents, in addition to that of OurBackend."""

    builder = LatentBuilder
    impl = LatentImpl

    @classmethod
    def validate_configuration(cls, *args: Any, **config: Any) -> list[str]:
        head_size, dtype = config["head_size"], config["dtype"]
        value_dims = cls.ours.capabilities.value_dims
        rank = min(head_size, head_size if value_dims is None or value_dims.maximum is None else value_dims.maximum)
        spec = latent_spec(1, rank, head_size - rank, page_sizes(cls.ours)[0], dtype)
        reasons = cache_reasons(config.get("kv_cache_dtype"), dtype) + cls.ours.unsupported_reasons(spec, CUDA)
        return [*super().validate_configuration(*args, **config), *reasons]


__getattr__ = classes_over(LatentBackend, "triton_mla", "flash_attn3_mla", "flashmla")

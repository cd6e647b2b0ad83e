"""Dense latent attention of attn-backends in vLLM: projections, prefill and cache stay vLLM's, decode is ours."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.mla.triton_mla import TritonMLABackend, TritonMLAImpl, TritonMLAMetadataBuilder

import attn_backends
from builders import AttentionBatch, AttentionKind, AttentionSpec
from engines.vllm.kv_views import latents
from engines.vllm.v0_33.batch import check_causality
from engines.vllm.v0_33.log import say_update
from engines.vllm.v0_33.reasons import cache_reasons, require_served, serves_blocks, serves_capability

OURS = attn_backends.get("triton_mla")
_PAGE_SIZE = 16
"""Of a spec until the cache says its own."""


class LatentBuilder(TritonMLAMetadataBuilder):
    """vLLM's metadata, and in its decode part ours: views of the same tensors, with splits by shape."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        dims, scheduler = self.mla_dims, vllm_config.scheduler_config
        dtype = self.model_config.dtype
        spec = latent_spec(self.num_heads, dims.kv_lora_rank, dims.qk_rope_head_dim, self.page_size, dtype)
        rows, self.max_seq_len = scheduler.max_num_seqs, self.model_config.max_model_len
        self.inner = OURS.builder(
            spec, device, max_reqs=rows, max_tokens=scheduler.max_num_batched_tokens, max_seq_len=self.max_seq_len
        )
        reasons = [] if self.supports_draft_decode_metadata_update else ["decode context parallelism is on"]
        say_update(TritonLatents.get_name(), reasons)
        # By query length and row: padding rows of a graph own tokens, as all others do.
        lens = torch.arange(1, self.reorder_batch_threshold + 1, dtype=torch.int32, device=device)
        self.starts = lens[:, None] * torch.arange(rows + 1, dtype=torch.int32, device=device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> Any:
        """See vLLM, which takes causality that is a tensor for True. Raises BatchError as `check_causality` does."""
        check_causality(common_attn_metadata, serves_blocks=serves_blocks(OURS), sliding_window=None)
        return super().build(common_prefix_len, common_attn_metadata, fast_build)

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
        none = block_table_tensor.new_empty(0, dtype=torch.int64)
        batch = AttentionBatch(
            num_reqs=rows,
            num_tokens=num_decode_tokens,
            max_query_len=query_len,
            max_seq_len=self.max_seq_len,
            uniform=True,
            query_start_loc=self.starts[query_len - 1, : rows + 1],
            seq_lens=seq_lens_device,
            positions=none,
            block_table=block_table_tensor,
            slot_mapping=none,
        )
        decode.paged = self.inner.build(batch)
        return decode


class LatentImpl(TritonMLAImpl):
    """A layer whose decode is ours. It returns no logsumexp, so that nothing can be combined with its output, and no
    kind of context parallelism is offered."""

    can_return_lse_for_decode = supports_dcp = supports_pcp = False

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        dims = (self.num_heads, self.kv_lora_rank, self.qk_rope_head_dim)
        spec = latent_spec(*dims, _PAGE_SIZE, torch.get_default_dtype(), scale=self.scale)
        padded = None if self.q_pad_num_heads in (None, self.num_heads) else self.q_pad_num_heads
        require_served(OURS, spec, {"q_pad_num_heads": padded})
        self.spec = cache(lambda page_size, causal: replace(spec, page_size=page_size, causal=causal))

    def forward_mqa(
        self, q: Any, kv_c_and_k_pe_cache: torch.Tensor, attn_metadata: Any, layer: Any
    ) -> tuple[torch.Tensor, None]:
        """See vLLM. Raises BatchError for a cache whose layout is not known."""
        query = torch.cat(q, -1) if isinstance(q, tuple) else q
        spec = self.spec(kv_c_and_k_pe_cache.shape[1], attn_metadata.causal)
        store = latents(kv_c_and_k_pe_cache, spec.head_dim, spec.out_dim)
        return OURS.forward(query, store, attn_metadata.decode.paged, spec=spec), None


def latent_spec(
    num_heads: int, rank: int, rope_dim: int, page_size: int, dtype: torch.dtype, scale: float | None = None
) -> AttentionSpec:
    """Latents of rank + rope_dim dims, the first `rank` of them the values."""
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


class TritonLatents(TritonMLABackend):
    """vLLM's Triton backend for latents with the decode of attn-backends."""

    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "float16", "bfloat16"]

    @staticmethod
    def get_name() -> str:
        return "ATTN_BACKENDS_TRITON_MLA"

    @staticmethod
    def get_builder_cls() -> type[LatentBuilder]:
        return LatentBuilder

    @staticmethod
    def get_impl_cls() -> type[LatentImpl]:
        return LatentImpl

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return False

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return head_size in OURS.capabilities.head_dims

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return serves_capability(OURS, (capability.major, capability.minor))

    @classmethod
    def supports_non_causal(cls) -> bool:
        return serves_blocks(OURS)

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        """No: a launch is sized by the longest query that the host knows of."""
        return False

    @classmethod
    def validate_configuration(cls, *args: Any, **asked: Any) -> list[str]:
        """vLLM's reasons in its words, and ours in ours."""
        ours = cache_reasons(asked.get("kv_cache_dtype"), asked["dtype"])
        return [*super().validate_configuration(*args, **asked), *ours]

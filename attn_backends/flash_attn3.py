"""FlashAttention-3 on Hopper, with the kernels of vLLM's build of it."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as version_of

import torch
from vllm.vllm_flash_attn import flash_attn_interface as provider  # type: ignore[import-not-found]

from attn_backends.base import AttentionBackend, KVCache, check_forward_inputs
from attn_backends.capabilities import Capabilities, Feature, Sizes
from builders import AttentionSpec, FlashAttn3Builder, PagedMetadata

if not provider.FA3_AVAILABLE:
    raise ImportError(f"vllm.vllm_flash_attn is here without FlashAttention-3: {provider.FA3_UNAVAILABLE_REASON}")


def _provider_version() -> str:
    try:
        return f"vllm {version_of('vllm')}"
    except PackageNotFoundError:  # the kernels alone, unpacked beside their wheel's metadata
        return "vllm of unknown version"


class FlashAttn3(AttentionBackend):
    """Paged decode and extend by flash_attn_varlen_func; split-KV decode, GQA, window, soft cap and sinks.

    The kernel takes sinks in bf16 only: they are rounded to it, in the graph too.
    """

    name = "flash_attn3"
    version = _provider_version()
    builder = FlashAttn3Builder
    capabilities = Capabilities(
        devices=("cuda",),
        dtypes=(torch.bfloat16, torch.float16),
        head_dims=Sizes(minimum=64, maximum=256, multiple_of=8),
        page_sizes=Sizes(minimum=16, multiple_of=16),
        features=frozenset({Feature.GQA, Feature.SLIDING_WINDOW, Feature.SOFT_CAP, Feature.SINKS}),
        compute_capability=(9, 0),
    )

    def further_reasons(self, spec: AttentionSpec, device: torch.device) -> list[str]:
        if device.type == "cuda" and torch.cuda.is_available() and torch.cuda.get_device_capability(device)[0] != 9:
            return [f"runs on compute capability 9 alone, the device has {torch.cuda.get_device_capability(device)}"]
        return []

    def forward(
        self,
        query: torch.Tensor,
        cache: KVCache,
        metadata: PagedMetadata,
        *,
        spec: AttentionSpec,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        check_forward_inputs(query, cache, metadata, spec, sinks)
        window = None if spec.sliding_window is None else [spec.sliding_window - 1, 0]
        out: torch.Tensor = provider.flash_attn_varlen_func(
            query,
            cache.key,
            cache.value,
            max_seqlen_q=metadata.max_query_len,
            cu_seqlens_q=metadata.query_start_loc,
            max_seqlen_k=metadata.max_seq_len,
            seqused_k=metadata.seq_lens,
            softmax_scale=spec.softmax_scale,
            causal=True,
            window_size=window,
            softcap=spec.soft_cap or 0.0,
            block_table=metadata.block_table,
            num_splits=metadata.num_splits,
            s_aux=None if sinks is None else sinks.to(torch.bfloat16),
            fa_version=3,
        )
        return out

"""FlashAttention-3 over latents on Hopper: DeepSeek's dense attention in absorbed form.

See builders/flash_attn3.py for its builder.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attn_backends.base import AttentionBackend, Sinks, check_forward_inputs
from attn_backends.capabilities import Capabilities, Feature, FusedWrite, Sizes
from attn_backends.fa3_providers import PROVIDER_VARIABLE
from attn_backends.flash_attn3 import PROVIDER
from attn_backends.fused_writes import FusedLatentWrite
from attn_backends.kv_cache import KVCache
from builders import AttentionKind, AttentionSpec
from builders.flash_attn3 import FlashAttn3Builder, FlashAttn3Metadata

_LATENT, _ROTARY = 512, 64


class FlashAttn3Mla(FusedLatentWrite, AttentionBackend):
    """Latents of 512 dims plus 64 rotary ones, in PROVIDER's kernels for values wider than keys.

    The rotary dims are the key; the latent is the value, and also a second key for the queries' first 512 dims. Nothing
    is copied: both are views of the cache.
    """

    name = "flash_attn3_mla"
    version = PROVIDER.version
    contract_version = (1, 2)
    builder = FlashAttn3Builder
    capabilities = Capabilities(
        devices=("cuda",),
        dtypes=(torch.bfloat16,),
        head_dims=Sizes(minimum=_LATENT + _ROTARY, maximum=_LATENT + _ROTARY),
        value_dims=Sizes(minimum=_LATENT, maximum=_LATENT),
        # Its tiles have 64 tokens. Pages of 64 are read whole if there are several query tokens: on an H200, NaN after
        # the last token reached the output.
        page_sizes=Sizes(maximum=63),
        features=frozenset({Feature.GQA, Feature.VALUE_DIM, Feature.NON_CAUSAL}),
        fused_writes=frozenset({FusedWrite.KV_A_NORM_ROPE}),
        required=frozenset({Feature.VALUE_DIM}),
        kinds=(AttentionKind.MLA,),
        compute_capability=(9, 0),
        one_major_version=True,
    )

    def unsupported_reasons(self, spec: AttentionSpec, device: torch.device) -> list[str]:
        if PROVIDER.serves_latents:
            return []
        return [
            f"{PROVIDER.version} lacks the kernels for values wider than keys, which latents need; pin another build "
            f"with {PROVIDER_VARIABLE}"
        ]

    def forward(
        self, query: Tensor, cache: KVCache, metadata: FlashAttn3Metadata, *, spec: AttentionSpec, sinks: Sinks = None
    ) -> Tensor:
        check_forward_inputs(query, cache, metadata, spec, sinks)
        return PROVIDER.attend_to_latents(query, cache, metadata, spec)

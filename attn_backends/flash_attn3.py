"""FlashAttention-3 on Hopper, with the kernels of any package that provides them."""

from __future__ import annotations

import torch
from torch import Tensor

from attn_backends.base import AttentionBackend, Sinks, check_forward_inputs
from attn_backends.capabilities import Capabilities, Feature, FusedWrite, Sizes
from attn_backends.fa3_providers import find_provider
from attn_backends.fused_writes import FusedRopeWrite
from attn_backends.kernels.e4m3 import to_e4m3
from attn_backends.kv_cache import KVCache
from attn_backends.merged_trees import merge_tree, merged_tree_reasons
from builders import AttentionSpec
from builders.flash_attn3 import FlashAttn3Builder, FlashAttn3Metadata

PROVIDER = find_provider()

_SINK_HEADS = 64


class FlashAttn3(FusedRopeWrite, AttentionBackend):
    """Paged decode and extend with PROVIDER: split-KV decode, and the features that its kernels have.

    The kernels take sinks in bf16 only, so sinks are rounded to it, in the graph too. Over an e4m3 cache they multiply
    e4m3: queries are clamped and rounded to it, with a scale of 1, and outputs are bf16. They do not
    support trees: their output over a tree's prefix, and its lse, are merged with the tree's own attention, whose sinks
    are exact.
    """

    name = "flash_attn3"
    version = PROVIDER.version
    contract_version = (1, 2)
    builder = FlashAttn3Builder
    capabilities = Capabilities(
        devices=("cuda",),
        dtypes=PROVIDER.dtypes,
        kv_dtypes=PROVIDER.kv_dtypes,
        quantises_queries=True,
        head_dims=PROVIDER.head_dims,
        value_dims=Sizes(minimum=16, maximum=512, multiple_of=8) if Feature.VALUE_DIM in PROVIDER.features else None,
        page_sizes=PROVIDER.page_sizes,
        features=PROVIDER.features,
        fused_writes=frozenset({FusedWrite.ROPE}),
        compute_capability=(9, 0),
        one_major_version=True,
    )

    def unsupported_reasons(self, spec: AttentionSpec, device: torch.device) -> list[str]:
        head_dim, value_dim, features = spec.head_dim, spec.out_dim, self.capabilities.features
        same_dim = head_dim == value_dim
        reasons = merged_tree_reasons(spec)
        # vLLM's build checks these limits of sinks; they are applied to the other builds too.
        if Feature.SINKS in features and spec.sinks and spec.num_q_heads > _SINK_HEADS:
            reasons.append(f"with sinks num_q_heads must be at most {_SINK_HEADS}, got {spec.num_q_heads}")
        if Feature.SINKS in features and spec.sinks and spec.dtype is not torch.bfloat16:
            reasons.append(f"with sinks dtype must be bfloat16, to which the kernels round them, got {spec.dtype}")
        if Feature.SINKS in features and spec.sinks and not same_dim:
            reasons.append(f"with sinks value_dim must equal head_dim, got {value_dim} and {head_dim}")
        # The e4m3 configurations that were tested.
        tested = spec.dtype is torch.bfloat16 and head_dim in (64, 128, 256) and same_dim
        if spec.cache_dtype.itemsize == 1 and not tested:
            reasons.append(
                "with an e4m3 cache, dtype must be bfloat16 and head_dim and value_dim both 64, 128 or 256, got "
                f"{spec.dtype}, {head_dim} and {value_dim}"
            )
        # Kernels with two dims are compiled for 64 with 256 or 512, and for 192 with 128; smaller ones are padded to
        # them. Wrong on an H200: value_dim 64 with head_dim 32, and, over pages of 128, 96 to 192 with 64.
        compiled = (head_dim == 64 and value_dim > 192) or (128 < head_dim <= 192 and 96 < value_dim <= 128)
        if Feature.VALUE_DIM in features and not (same_dim or compiled):
            reasons.append(
                "a value_dim other than head_dim must be 200 to 512 with head_dim 64, or 104 to 128 with head_dim 136 "
                f"to 192, got {value_dim} with {head_dim}"
            )
        return reasons

    def forward(
        self, query: Tensor, cache: KVCache, metadata: FlashAttn3Metadata, *, spec: AttentionSpec, sinks: Sinks = None
    ) -> Tensor:
        check_forward_inputs(query, cache, metadata, spec, sinks)
        if spec.cache_dtype.itemsize == 1:
            query = to_e4m3(query)
        if metadata.tree_masks is None:
            return PROVIDER.attend(query, cache, metadata, spec, sinks=sinks)
        out, lse = PROVIDER.attend_to_prefix(query, cache, metadata, spec)
        return merge_tree(out, lse.t(), query, cache, metadata, spec, sinks, lse_base_2=False)

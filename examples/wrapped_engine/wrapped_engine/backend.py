"""The engine's kernel behind the backend contract, with each of the engine's two builders."""

from __future__ import annotations

import torch

from attn_backends import AttentionBackend, Capabilities, Feature, KVCache, Sizes, check_forward_inputs
from builders import AttentionSpec
from wrapped_engine import engine
from wrapped_engine.builder import DriftingBuilder, WrappedBuilder, WrappedMetadata


class EnginePaged(AttentionBackend):
    name = "engine_paged"
    version = "0.1.0"
    contract_version = (1, 2)
    builder = WrappedBuilder
    capabilities = Capabilities(
        devices=("cpu", "cuda"),
        dtypes=(torch.float32, torch.bfloat16, torch.float16),
        head_dims=Sizes(),
        page_sizes=Sizes(),
        features=frozenset({Feature.GQA}),
    )

    def forward(
        self,
        query: torch.Tensor,
        cache: KVCache,
        metadata: WrappedMetadata,
        *,
        spec: AttentionSpec,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        check_forward_inputs(query, cache, metadata, spec, sinks)
        return engine.paged_attention(
            query, cache.key, cache.value, metadata.for_engine(), spec.softmax_scale, metadata.max_pages
        )


class EnginePagedDrifting(EnginePaged):
    name = "engine_paged_drifting"
    builder = DriftingBuilder

"""Backends of attn-backends over keys and values, as vLLM backends."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, ClassVar

import torch

import attn_backends
from attn_backends import Feature, KVCache
from attn_backends.engines.vllm.backend import OurBackend, OurBuilder, classes_over
from attn_backends.engines.vllm.batch import batch_of, check_causality
from attn_backends.engines.vllm.compat import (
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
    envs,
)
from attn_backends.engines.vllm.kv_views import keys_and_values, scales_of
from attn_backends.engines.vllm.reasons import (
    EIGHT_BITS,
    page_sizes,
    quantised_dtype,
    require_served,
    selector_reasons,
)
from attn_backends.kernels.write_kv import write_kv
from builders import AttentionSpec
from builders.errors import require

_LAYER = (
    *("num_heads", "head_size", "scale", "num_kv_heads", "alibi_slopes", "sliding_window", "kv_cache_dtype"),
    *("logits_soft_cap", "attn_type", "kv_sharing_target_layer_name"),
)
"""vLLM's positional arguments of a layer, in order."""


@dataclass(frozen=True, slots=True)
class LayerMetadata:
    """The inner builder's metadata, whether the batch is causal, which vLLM sets per batch and not per layer, and its
    slots, under the name that all of vLLM's metadata have."""

    ours: Any
    causal: bool
    slot_mapping: torch.Tensor


class PagedBuilder(OurBuilder, AttentionMetadataBuilder[LayerMetadata]):
    """This library's builder over vLLM's tensors. vLLM advances its lengths itself: an update refreshes the rest."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        layers = vllm_config.compilation_config.static_forward_context
        # Without its hybrid KV cache manager, vLLM puts layers with and without a window into one group, in any order.
        # Metadata for the window serves all of them.
        specs = (layers[name].impl.spec(kv_cache_spec.block_size) for name in layer_names)
        spec = min(specs, key=lambda spec: spec.sliding_window or math.inf)
        self.sliding_window = spec.sliding_window
        self.make_inner(spec, device, vllm_config)

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        """Claim graphs of one query length at most: a batch of mixed lengths has no graph here."""
        uniform = AttentionCGSupport.UNIFORM_BATCH.value
        return AttentionCGSupport(min(int(cls.ours.builder.graph_support), uniform))

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> LayerMetadata:
        """See vLLM. Raises BatchError for a common prefix, which vLLM never has, and as `check_causality` and
        `batch_of` do."""
        require(
            common_prefix_len == 0,
            f"attn-backends has no cascade attention, got a common prefix of {common_prefix_len} tokens; they would be "
            "attended to twice or never. Use a supported vLLM, which passes 0.",
        )
        check_causality(common_attn_metadata, serves_blocks=self.serves_blocks, sliding_window=self.sliding_window)
        batch, causal = batch_of(common_attn_metadata, max_seq_len=self.max_seq_len), common_attn_metadata.causal
        return LayerMetadata(self.inner[causal].build(batch), causal, common_attn_metadata.slot_mapping)

    def update_draft_decode_metadata(self, metadata: LayerMetadata) -> None:
        """Refresh from vLLM's current lengths. Raises nothing that build() has not raised before."""
        self.inner[metadata.causal].advance(metadata.ours)


class PagedImpl(AttentionImpl[Any]):
    """A layer's cache write and forward with a backend of this library, over vLLM's own cache."""

    ours: ClassVar[attn_backends.AttentionBackend]
    sinks: torch.Tensor | None

    def __init__(self, *layer: Any, sinks: torch.Tensor | None = None, **extras: Any) -> None:
        """layer: vLLM's arguments, in the order of _LAYER. Raises ValueError for a layer that `ours` cannot serve."""
        options = {**dict.fromkeys(_LAYER), **dict(zip(_LAYER, layer, strict=False)), **extras}
        self.num_heads, self.head_size = options.pop("num_heads"), options.pop("head_size")
        self.loaded_sinks, self.sinks = sinks, None
        self.num_kv_heads = options.pop("num_kv_heads") or self.num_heads
        self.scale, self.kv_cache_dtype = float(options.pop("scale")), options.pop("kv_cache_dtype")
        spec = AttentionSpec(
            num_q_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_size,
            page_size=page_sizes(self.ours)[0],
            dtype=torch.get_default_dtype(),
            kv_dtype=quantised_dtype(self.kv_cache_dtype),
            sliding_window=options.pop("sliding_window"),
            scale=self.scale,
            soft_cap=options.pop("logits_soft_cap") or None,
            sinks=sinks is not None,
            batch_invariant=bool(envs.VLLM_BATCH_INVARIANT),
        )
        if options["attn_type"] == AttentionType.DECODER:
            options.pop("attn_type")
        require_served(self.ours, spec, options)
        self.spec = cache(lambda page_size, causal=True: replace(spec, page_size=page_size, causal=causal))

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Copy the sinks, which models hold in their own dtype, to fp32, which the kernels read. A later load of
        weights updates the copy in place, because graphs read it."""
        if self.loaded_sinks is not None:
            loaded = self.loaded_sinks.detach()
            self.sinks = loaded.float() if self.sinks is None else self.sinks.copy_(loaded)

    def do_kv_cache_update(
        self, layer: Any, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        """Store new keys and values [T, num_kv_heads, head_size] at slot_mapping; -1 writes nothing.

        Raises BatchError for a cache of unknown layout.
        """
        tokens, store = min(len(slot_mapping), len(key)), self._store(layer, kv_cache)
        write_kv(key[:tokens], value[:tokens], store.key, store.value, slot_mapping[:tokens], store.both_scales)

    def _store(self, layer: Any, kv_cache: torch.Tensor) -> KVCache:
        """View vLLM's cache, with the layer's scales if it is in 8 bits."""
        scales = scales_of(layer) if self.kv_cache_dtype in EIGHT_BITS else None
        return keys_and_values(kv_cache, self.head_size, scales)

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: Any,
        value: Any,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        **scales: Any,
    ) -> torch.Tensor:
        """Write the attention of query [T, num_heads, head_size] to output.

        Raises BatchError for tensors that the kernels would misread.
        """
        if attn_metadata is None:  # vLLM's memory profiling run
            return output.fill_(0)
        metadata, store = attn_metadata.ours, self._store(layer, kv_cache)
        tokens, spec = metadata.num_tokens, self.spec(store.key.shape[1], attn_metadata.causal)
        out = self.ours.forward(query[:tokens], store, metadata, spec=spec, sinks=self.sinks)
        output[:tokens].view_as(out).copy_(out)
        return output


class PagedBackend(OurBackend):
    """vLLM's interface for backends over keys and values, in addition to that of OurBackend."""

    builder = PagedBuilder
    impl = PagedImpl
    forward_includes_kv_cache_update = False

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return Feature.BATCH_INVARIANT in cls.ours.capabilities.features

    @classmethod
    def validate_configuration(cls, *args: Any, **config: Any) -> list[str]:
        return [*super().validate_configuration(*args, **config), *selector_reasons(cls.ours, **config)]


__getattr__ = classes_over(PagedBackend, "triton_paged", "flash_attn3")

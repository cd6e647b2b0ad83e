"""FlashInfer's builder in native decode, as on Hopper without kernels from the network."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from attn_backends import AttentionBackend, Sizes
from builders import AttentionSpec
from engine_kits.engine_cache import NoAttention
from engine_kits.subjects import HEADS, backend_class
from engine_kits.vllm.config import LAYER
from engine_kits.vllm.making import builder_class, heads_group


def backend() -> type[AttentionBackend]:
    import vllm.v1.attention.backends.flashinfer as engine_module

    for name in ("BatchDecodeWithPagedKVCacheWrapper", "BatchPrefillWithPagedKVCacheWrapper"):
        vars(engine_module)[name] = _Wrapper
    fields = ("slot_mapping", "page_indices")
    builder = builder_class(engine_module.FlashInferMetadataBuilder, heads_group, fields, prepare=_prepare)

    def tensors_of(self: Any, metadata: Any) -> dict[str, torch.Tensor]:
        # A decode's wrapper, which is not a tensor, holds the builder's list.
        return {"slot_mapping": metadata.slot_mapping, "page_indices": self.inner.paged_kv_indices}

    builder.tensors_of = tensors_of  # type: ignore[method-assign]
    pages = replace(HEADS, page_sizes=Sizes(minimum=16, maximum=64, multiple_of=16))
    return backend_class(__name__, builder, pages, NoAttention)


class _Wrapper:
    """Replaces FlashInfer's own, which plans and attends on a GPU. It stores nothing: a workspace is large."""

    is_cuda_graph_enabled = False

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def plan(self, *args: Any, **kwargs: Any) -> None: ...


def _prepare(config: Any, spec: AttentionSpec) -> None:
    """Add the layer whose scale and window are planned for."""
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.v1.attention.backends.flashinfer import FlashInferImpl

    impl = object.__new__(FlashInferImpl)
    window = None if spec.sliding_window is None else (spec.window_left, 0)
    sizes = {"num_heads": spec.num_q_heads, "scale": spec.softmax_scale}
    vars(impl).update(sizes, sliding_window=window, logits_soft_cap=None, sinks=None)
    without = dict.fromkeys(AttentionLayerBase.__abstractmethods__)
    layer: Any = type("Layer", (AttentionLayerBase,), without)()
    layer.impl = impl
    config.compilation_config.static_forward_context[LAYER] = layer
    config.cache_config.kv_cache_layout = "LBNHC"
    # Otherwise vLLM fetches XQA kernels from the network, which claim no update either.
    config.attention_config.use_trtllm_attention = False

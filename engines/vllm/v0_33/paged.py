"""Backends of attn-backends over keys and values, as backends of vLLM."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any, ClassVar

import torch
from vllm import envs
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
    MultipleOf,
)

import attn_backends
from attn_backends import Feature
from attn_backends.kernels.write_kv import write_kv
from builders import AdvanceLevel, AttentionSpec
from builders.errors import require
from engines.vllm.kv_views import keys_and_values
from engines.vllm.v0_33.batch import batch_of, check_causality
from engines.vllm.v0_33.log import say_update
from engines.vllm.v0_33.reasons import require_served, selector_reasons, serves_blocks, serves_capability

PREFIX = "ATTN_BACKENDS_"
"""Of vLLM's names for them."""
_LAYER = (
    *("num_heads", "head_size", "scale", "num_kv_heads", "alibi_slopes", "sliding_window", "kv_cache_dtype"),
    *("logits_soft_cap", "attn_type", "kv_sharing_target_layer_name"),
)
"""What vLLM says of a layer, in the order that it passes it in."""
_PAGE_SIZES = (16, 32, 64, 128)
"""Kernel block sizes that vLLM chooses among, where a backend takes powers of two."""


@dataclass(frozen=True, slots=True)
class LayerMetadata:
    """Our builder's metadata, and whether the batch attends causally: vLLM says so of a batch, not of a layer."""

    ours: Any
    causal: bool


class PagedBuilder(AttentionMetadataBuilder[LayerMetadata]):
    """One of ours over vLLM's tensors. vLLM moves its lengths itself: an update refreshes what is made of them."""

    ours: ClassVar[attn_backends.AttentionBackend]

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        impl = vllm_config.compilation_config.static_forward_context[layer_names[0]].impl
        spec, scheduler = impl.spec(kv_cache_spec.block_size), vllm_config.scheduler_config
        self.max_seq_len, self.sliding_window = vllm_config.model_config.max_model_len, spec.sliding_window
        self.serves_blocks = serves_blocks(self.ours)
        self.inner = {
            causal: self.ours.builder(
                replace(spec, causal=causal),
                device,
                max_reqs=scheduler.max_num_seqs,
                max_tokens=scheduler.max_num_batched_tokens,
                max_seq_len=self.max_seq_len,
            )
            for causal in ((True, False) if self.serves_blocks else (True,))
        }
        support = self.ours.builder.advance_support(spec, device)
        self.supports_draft_decode_metadata_update = support.level is AdvanceLevel.IN_GRAPH
        reasons = [] if self.supports_draft_decode_metadata_update else [support.reason]
        say_update(f"{PREFIX}{self.ours.name.upper()}", reasons)

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        """What is declared to vLLM: graphs of one query length at most, a batch of mixed lengths has none here."""
        most = AttentionCGSupport.UNIFORM_BATCH.value
        return AttentionCGSupport(min(int(cls.ours.builder.graph_support), most))

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> LayerMetadata:
        """See vLLM. Raises BatchError for a common prefix, which vLLM 0.33 never has, and as `check_causality` and
        `batch_of` do."""
        require(
            common_prefix_len == 0,
            f"attn-backends has no cascade attention, got a common prefix of {common_prefix_len} tokens; they would be "
            "attended to twice or never. Use a vLLM 0.33, which passes 0.",
        )
        check_causality(common_attn_metadata, serves_blocks=self.serves_blocks, sliding_window=self.sliding_window)
        batch, causal = batch_of(common_attn_metadata, max_seq_len=self.max_seq_len), common_attn_metadata.causal
        return LayerMetadata(self.inner[causal].build(batch), causal)

    def update_draft_decode_metadata(self, metadata: LayerMetadata) -> None:
        """Refresh from vLLM's lengths as they stand. Raises nothing that build() has not."""
        self.inner[metadata.causal].advance(metadata.ours)


class PagedImpl(AttentionImpl[Any]):
    """A layer's cache write and forward by one of ours, over vLLM's own cache."""

    ours: ClassVar[attn_backends.AttentionBackend]

    def __init__(self, *layer: Any, sinks: torch.Tensor | None = None, **extras: Any) -> None:
        """layer: what vLLM says of it, in the order of _LAYER. Raises ValueError for one that ours does not serve."""
        asked = {**dict.fromkeys(_LAYER), **dict(zip(_LAYER, layer, strict=False)), **extras}
        self.num_heads, self.head_size, self.sinks = asked.pop("num_heads"), asked.pop("head_size"), sinks
        self.num_kv_heads = asked.pop("num_kv_heads") or self.num_heads
        self.scale, self.kv_cache_dtype = float(asked.pop("scale")), asked.pop("kv_cache_dtype")
        spec = AttentionSpec(
            num_q_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_size,
            page_size=_PAGE_SIZES[0],
            dtype=torch.get_default_dtype(),
            sliding_window=asked.pop("sliding_window"),
            scale=self.scale,
            soft_cap=asked.pop("logits_soft_cap") or None,
            sinks=sinks is not None,
            batch_invariant=bool(envs.VLLM_BATCH_INVARIANT),
        )
        if asked["attn_type"] == AttentionType.DECODER:
            asked.pop("attn_type")
        require_served(self.ours, spec, asked)
        self.spec = cache(lambda page_size, causal=True: replace(spec, page_size=page_size, causal=causal))

    def do_kv_cache_update(
        self, layer: Any, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        """Store new keys and values [T, num_kv_heads, head_size] where slot_mapping says; -1 writes nothing.

        Raises BatchError for a cache whose layout is not known.
        """
        tokens, store = min(len(slot_mapping), len(key)), keys_and_values(kv_cache, self.head_size)
        write_kv(key[:tokens], value[:tokens], store.key, store.value, slot_mapping[:tokens])

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
        """Attention of query [T, num_heads, head_size], written to output.

        Raises BatchError for tensors that the kernels would misread.
        """
        if attn_metadata is None:  # vLLM measures its memory
            return output.fill_(0)
        metadata, store = attn_metadata.ours, keys_and_values(kv_cache, self.head_size)
        tokens, spec = metadata.num_tokens, self.spec(store.key.shape[1], attn_metadata.causal)
        out = self.ours.forward(query[:tokens], store, metadata, spec=spec, sinks=self.sinks)
        output[:tokens].view_as(out).copy_(out)
        return output


class PagedBackend(AttentionBackend):
    """What vLLM asks of a backend, answered from our record of it."""

    ours: ClassVar[attn_backends.AttentionBackend]
    builder: ClassVar[type[PagedBuilder]]
    impl: ClassVar[type[PagedImpl]]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "float16", "bfloat16"]
    forward_includes_kv_cache_update = False

    @classmethod
    def get_name(cls) -> str:
        return f"{PREFIX}{cls.ours.name.upper()}"

    @classmethod
    def get_impl_cls(cls) -> type[PagedImpl]:
        return cls.impl

    @classmethod
    def get_builder_cls(cls) -> type[PagedBuilder]:
        return cls.builder

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return head_size in cls.ours.capabilities.head_dims

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return Feature.SLIDING_WINDOW in cls.ours.capabilities.features

    @classmethod
    def supports_sink(cls) -> bool:
        return Feature.SINKS in cls.ours.capabilities.features

    @classmethod
    def supports_non_causal(cls) -> bool:
        return serves_blocks(cls.ours)

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return Feature.BATCH_INVARIANT in cls.ours.capabilities.features

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        """No: a launch is sized by the longest query that the host knows of."""
        return False

    @classmethod
    def get_supported_kernel_block_sizes(cls, kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        sizes = cls.ours.capabilities.page_sizes
        if sizes.power_of_two:
            return [size for size in _PAGE_SIZES if size in sizes]
        return [MultipleOf(sizes.multiple_of)]

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return serves_capability(cls.ours, (capability.major, capability.minor))

    @classmethod
    def validate_configuration(cls, *args: Any, **asked: Any) -> list[str]:
        """vLLM's reasons in its words, and ours in ours."""
        return [*super().validate_configuration(*args, **asked), *selector_reasons(cls.ours, **asked)]


@cache
def vllm_backend(name: str) -> type[PagedBackend]:
    """The backend that is registered with attn-backends by this name, as a class of vLLM's.

    Raises ImportError where its kernels' package is missing, which vLLM shows as the reason.
    """
    try:
        ours = attn_backends.get(name)
    except attn_backends.BrokenBackend as error:
        raise ImportError(str(error)) from error
    return over(ours)


def over(ours: attn_backends.AttentionBackend) -> type[PagedBackend]:
    """A class of vLLM's over one of our backends."""
    title = "".join(part.capitalize() for part in ours.name.split("_"))
    supported = [dtype for dtype in ours.capabilities.dtypes if dtype.itemsize == 2]
    parts = {
        "builder": type(f"{title}Builder", (PagedBuilder,), {"ours": ours}),
        "impl": type(f"{title}Impl", (PagedImpl,), {"ours": ours}),
    }
    # vLLM finds the class again by its module and name.
    return type(title, (PagedBackend,), {"ours": ours, "supported_dtypes": supported, "__module__": __name__, **parts})


_CLASSES = {"TritonPaged": "triton_paged", "FlashAttn3": "flash_attn3"}


def __getattr__(attribute: str) -> type[PagedBackend]:
    if attribute not in _CLASSES:
        raise AttributeError(f"module {__name__} has no attribute {attribute!r}")
    return vllm_backend(_CLASSES[attribute])

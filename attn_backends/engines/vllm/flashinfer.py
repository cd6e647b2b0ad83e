"""vLLM's FlashInfer backend with its decode plan made on the device: metadata that updates in a graph.

Everything but the plan is vLLM's. On Hopper vLLM prefers to decode with XQA, whose metadata it cannot update in a
graph; this backend uses FlashInfer's FA2 kernel, for one token per request and for 1 + K. A block of draft tokens,
which is not causal, has no decode wrapper in FlashInfer: it takes the prefill wrapper, planned the same way.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import torch

from attn_backends.engines.vllm.backend import UpdatedInGraph, log_update
from attn_backends.engines.vllm.batch import batch_of, check_causality
from attn_backends.engines.vllm.compat import (
    AttentionCGSupport,
    CommonAttentionMetadata,
    CUDAGraphMode,
    split_decodes_and_prefills,
)
from attn_backends.engines.vllm.device_plan import NO_FLASHINFER, DevicePlan
from attn_backends.engines.vllm.reasons import cache_reasons
from builders import AttentionSpec
from builders.errors import require
from builders.flashinfer.wrappers import FlashInferWrappers

try:
    from attn_backends.engines.vllm.compat import (
        FIDecode,
        FIPrefill,
        FlashInferBackend,
        FlashInferImpl,
        FlashInferMetadata,
        FlashInferMetadataBuilder,
        get_flashinfer_layout_string,
    )
except ModuleNotFoundError as error:
    raise ImportError(f"{error}: FLASHINFER_IN_GRAPH {NO_FLASHINFER}") from error

_MAX_ADDRESSES = 4
"""Maximum sets of vLLM buffers that one shape is planned for: vLLM's persistent buffers make one or two."""


class Shape(NamedTuple):
    """A batch that a graph-mode wrapper serves: all rows have query_len tokens, padding included."""

    num_reqs: int
    query_len: int
    causal: bool


@dataclass
class InGraphMetadata(FlashInferMetadata):
    """vLLM's metadata, plus the plan that an update refreshes; None if the batch was planned on the host."""

    plan: DevicePlan | None = None
    common: CommonAttentionMetadata | None = None


class InGraphBuilder(FlashInferMetadataBuilder):
    """Plans a batch shape on the host once; every later build and every update is one kernel.

    vLLM plans batches without their own graph, such as prefills, as usual.
    """

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.use_trtllm_decode_attention = self.use_xqa = False
        self.flashinfer_trtllm_api_decode_kernel = None
        self.use_fa2_native_decode = True
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
        refusals = {
            "decode context parallelism has its own lengths": self.use_dcp,
            "batch-invariant splits follow no plan": self.disable_split_kv or self.decode_fixed_split_size > 0,
            "a quantised cache is not served": self.cache_dtype != "auto",
            "full graphs are off": not self.enable_cuda_graph,
        }
        self.reasons = [reason for reason, holds in refusals.items() if holds]
        self.supports_draft_decode_metadata_update = not self.reasons
        log_update(InGraphFlashInfer.name, self.reasons)
        self._plans: dict[tuple[Shape, tuple[int, ...]], tuple[DevicePlan, InGraphMetadata]] = {}

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        """Claim graphs of 1 + K tokens per request: vLLM takes the minimum over all its groups, the target's too."""
        return AttentionCGSupport.UNIFORM_BATCH

    @classmethod
    def get_varlen_cudagraph_max_query_len(cls, vllm_config: Any, kv_cache_spec: Any) -> None:
        """Return None: a plan is for one query length."""
        return None

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> InGraphMetadata:
        """See vLLM. Raises BatchError as `check_causality` and `DevicePlan` do."""
        common = common_attn_metadata
        check_causality(common, serves_blocks=True, sliding_window=self._sliding_window)
        # vLLM resolves its mode after it makes the builders. Each graph-mode wrapper takes 8 MiB on the device, so none
        # is made per batch size if no graph is captured.
        self.enable_cuda_graph &= self.compilation_config.cudagraph_mode.decode_mode() == CUDAGraphMode.FULL
        shape = self._shape_of(common)
        key = (shape, _addresses(common)) if shape else None
        if key in self._plans:
            plan, planned = self._plans[key]
            plan.refresh()
            refreshed = copy(planned)
            refreshed.slot_mapping, refreshed.common = common.slot_mapping, common
            return refreshed
        base = super().build(common_prefix_len, common, fast_build)
        metadata = InGraphMetadata(**vars(base), common=common)
        if key and self._plans_on_device(key[0], base):
            if key[0].causal:
                # No other batch can plan this wrapper on the host: that would write its pages into vLLM's block table.
                wrapper = self._decode_wrappers_cudagraph.pop(key[0][:2])
            else:
                wrapper = self._wrappers.extend(batch_of(common, max_seq_len=self.model_config.max_model_len)).wrapper
                metadata.prefill = FIPrefill(wrapper=wrapper)
            spec = self._spec(causal=key[0].causal)
            metadata.plan = DevicePlan(
                wrapper, spec, common.seq_lens, common.block_table_tensor, query_len=key[0].query_len
            )
            metadata.plan.refresh()
            self._plans[key] = (metadata.plan, metadata)
        return metadata

    def update_draft_decode_metadata(self, metadata: InGraphMetadata) -> None:
        """Refresh the plan from vLLM's current lengths with one kernel; on the host for a batch without a graph.

        Raises BatchError if a batch without a plan on the device is captured.
        """
        if metadata.plan is not None:
            metadata.plan.refresh()
            return
        require(
            not (self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()),
            f"an in-graph update needs a plan on the device, this batch of {metadata.num_decodes} decodes has none; a "
            "replay would use a stale plan. Choose FLASH_ATTN for the draft.",
        )
        assert metadata.common is not None
        # A block's wrapper, vLLM's own for non-causal prefills, is planned again in place.
        metadata.decode = super().build(0, metadata.common).decode

    def forget_plans(self) -> None:
        """Drop the plans of a builder that no graph uses: each holds a wrapper, with 8 MiB on the device."""
        self._plans.clear()

    @property
    def _sliding_window(self) -> int | None:
        return self.window_left + 1 if self.window_left >= 0 else None

    def _shape_of(self, common: CommonAttentionMetadata) -> Shape | None:
        """Return the shape of a batch that a graph-mode wrapper serves, else None."""
        if self.reasons or not self.enable_cuda_graph:
            return None
        split = split_decodes_and_prefills(common, decode_threshold=self.reorder_batch_threshold, require_uniform=True)
        decodes, prefills, tokens, _ = split
        if prefills or decodes != common.num_reqs or not tokens or tokens % decodes:
            return None
        return Shape(decodes, tokens // decodes, common.causal)

    def _plans_on_device(self, shape: Shape, base: FlashInferMetadata) -> bool:
        plans = sum(planned == shape for planned, _ in self._plans)
        if shape.causal:
            graph = isinstance(base.decode, FIDecode) and base.decode.wrapper.is_cuda_graph_enabled
        else:
            graph = shape.num_reqs * shape.query_len <= self._decode_cudagraph_max_bs
        return graph and plans < _MAX_ADDRESSES

    @cached_property
    def _wrappers(self) -> FlashInferWrappers:
        """The wrappers for blocks, in the workspace of vLLM's own."""
        layout = get_flashinfer_layout_string(self.kv_cache_layout)
        partials = self._get_workspace_buffer()
        return FlashInferWrappers(self._spec(causal=False), self.device, kv_layout=layout, partials=partials)

    def _spec(self, *, causal: bool) -> AttentionSpec:
        return AttentionSpec(
            num_q_heads=self.num_qo_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            page_size=self.page_size,
            dtype=self.model_config.dtype,
            sliding_window=self._sliding_window,
            scale=self.sm_scale,
            soft_cap=self.logits_soft_cap or None,
            causal=causal,
        )


class InGraphImpl(FlashInferImpl):
    """vLLM's layer, which silently ignores ALiBi. No check has tried an update with a shared KV cache."""

    def __init__(self, *layer: Any, **extras: Any) -> None:
        """See vLLM. Raises ValueError for a layer with either."""
        super().__init__(*layer, **extras)
        if self.alibi_slopes is not None or self.kv_sharing_target_layer_name is not None:
            raise ValueError(
                f"{InGraphFlashInfer.name} supports neither ALiBi nor a KV cache shared by layers, a layer has one. "
                "Choose FLASH_ATTN."
            )


class InGraphFlashInfer(UpdatedInGraph, FlashInferBackend):
    """vLLM's FlashInfer without its quantised caches and sinks, which use other kernels there."""

    name = "FLASHINFER_IN_GRAPH"
    builder = InGraphBuilder
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "float16", "bfloat16"]

    @staticmethod
    def get_impl_cls() -> type[InGraphImpl]:
        return InGraphImpl

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        """Return the sizes that the checks of this library's `flashinfer` have run; vLLM's takes 512 too."""
        return [64, 128, 256]

    @classmethod
    def supports_sink(cls) -> bool:
        return False

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return False

    @classmethod
    def supports_kv_cache_dtype(cls, kv_cache_dtype: Any) -> bool:
        return kv_cache_dtype is None or kv_cache_dtype in cls.supported_kv_cache_dtypes

    @classmethod
    def validate_configuration(cls, *args: Any, **config: Any) -> list[str]:
        reasons = cache_reasons(config.get("kv_cache_dtype"), config["dtype"])
        return [*super().validate_configuration(*args, **config), *reasons]

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        return [16, 32, 64]

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        """Return whether FA2 decodes there: on compute capability 10 vLLM uses other kernels for the same metadata."""
        return (8, 0) <= (capability.major, capability.minor) < (10, 0)


def _addresses(common: CommonAttentionMetadata) -> tuple[int, ...]:
    """Return what a plan is bound to: the addresses of vLLM's lengths and table."""
    table = common.block_table_tensor
    return (common.seq_lens.data_ptr(), table.data_ptr(), table.stride(0), table.shape[1])

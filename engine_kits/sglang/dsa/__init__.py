"""The draft backend of SGLang's sparse attention for DeepSeek-V3.2, with FlashMLA's sparse kernel."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from attn_backends import AttentionBackend, Sizes
from builders import HostLengths
from engine_kits.sglang.attention import used_pages
from engine_kits.sglang.builder import DraftAttention, PlannedSteps
from engine_kits.sglang.stand_in import STEPS
from engine_kits.subjects import DENSE_LATENT, backend_class

_PAGE = 64
_COPIES = "sglang.kernels.ops.attention.dsa.fused_metadata_copy"


class DeepseekSparseAttnMultiStepBackend(PlannedSteps):
    host_lengths = HostLengths.NONE

    @staticmethod
    def make(runner: Any) -> Any:
        from sglang.srt.runtime_context import get_context
        from transformers import PretrainedConfig

        get_context().override("the kit", dsa_prefill_backend="flashmla_sparse", dsa_decode_backend="flashmla_sparse")
        sys.modules[_COPIES] = _Copies(_COPIES)
        import sglang.kernels.ops.attention.dsv4.topk as topk
        import sglang.srt.layers.attention.dsa_backend as engine_module

        vars(topk)["plan_topk_v2"] = _plan_topk
        vars(engine_module).update(resolve_paged_mqa_logits_metadata_fn=lambda: _schedule, resolve_num_sms=lambda: 132)
        config = PretrainedConfig(architectures=["DeepseekV3ForCausalLMNextN"], index_topk=2048)
        runner.model_config.hf_config = runner.model_config.hf_text_config = config
        runner.hisparse_coordinator = None
        runner.token_to_kv_pool.dsa_kv_cache_store_fp8 = False
        return engine_module.DeepseekSparseAttnMultiStepBackend(runner, topk=1, speculative_num_steps=STEPS)

    @staticmethod
    def kernel_inputs(metadata: Any, batch: Any, live: int) -> dict[str, Tensor]:
        lengths = metadata.cache_seqlens_int32
        return {
            "cache_seqlens_int32": lengths[:live],
            "cu_seqlens_k": metadata.cu_seqlens_k[: live + 1],
            "dsa_cache_seqlens_int32": metadata.dsa_cache_seqlens_int32[:live],
            "dsa_cu_seqlens_k": metadata.dsa_cu_seqlens_k[: live + 1],
            "paged_mqa_ctx_lens_2d": metadata.paged_mqa_ctx_lens_2d[:live],
            "paged_mqa_schedule_metadata": metadata.paged_mqa_schedule_metadata[:live],
            "topk_v2_plan": metadata.topk_v2_plan[:live],
            "real_page_table": used_pages(metadata.real_page_table, lengths, live, _PAGE),
        }

    @staticmethod
    def slots(metadata: Any, batch: Any) -> list[Tensor]:
        # The slots that the indexer can choose from.
        lengths = metadata.cache_seqlens_int32.tolist()
        return [row[:length] for row, length in zip(metadata.page_table_1, lengths, strict=True)]


def backend() -> type[AttentionBackend]:
    pages = replace(DENSE_LATENT, page_sizes=Sizes(minimum=_PAGE, maximum=_PAGE))
    return backend_class(__name__, DeepseekSparseAttnMultiStepBackend, pages, DraftAttention)


def _schedule(context_lens: Tensor, block: int, num_sms: int) -> Tensor:
    """Replaces DeepGEMM's schedule and, like it, depends on every length."""
    return ((context_lens + block - 1) // block).int().cumsum(0, dtype=torch.int32)


def _plan_topk(lengths: Tensor) -> Tensor:
    """Replaces the plan of SGLang's top-k kernel and, like it, depends on every length."""
    return lengths.clone()


class _Copies(ModuleType):
    """SGLang's two fused copies, as in its CUDA file: every source that is set goes into each destination."""

    @staticmethod
    def fused_metadata_copy_cuda(*args: Any) -> None:
        _copy(args[:9], args[9:18])

    @staticmethod
    def fused_metadata_copy_multi_cuda(*args: Any) -> None:
        for first in (8, 16, 24):
            _copy(args[:8], args[first : first + 8])


def _copy(sources: tuple[Tensor | None, ...], targets: tuple[Tensor | None, ...]) -> None:
    for source, target in zip(sources, targets, strict=True):
        if source is not None and target is not None:
            target[tuple(map(slice, source.shape))].copy_(source)

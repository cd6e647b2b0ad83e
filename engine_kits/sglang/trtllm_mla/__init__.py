"""The draft backend of SGLang's TRTLLM-gen kernels for dense latents, whose plan is the same on every device."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from attn_backends import AttentionBackend, Sizes
from builders import HostLengths
from engine_kits.sglang.attention import attend, in_pages, used_pages
from engine_kits.sglang.builder import DraftAttention, PlannedSteps
from engine_kits.sglang.stand_in import STEPS
from engine_kits.subjects import DENSE_LATENT, backend_class

_PAGE = 64


class TRTLLMMLAMultiStepDraftBackend(PlannedSteps):
    host_lengths = HostLengths.NONE
    held_as = "forward_decode_metadata"

    @staticmethod
    def make(runner: Any) -> Any:
        import sglang.srt.layers.attention.trtllm_mla_backend as engine_module

        vars(engine_module).update(
            _jit_fixup_module=lambda dtype: None,
            make_persistent_multi_ctas_kv_counter_buffer=lambda *args, **kwargs: None,
            can_use_set_mla_kv_concat_q=lambda *args: False,
        )
        runner.max_running_requests = runner.req_to_token_pool.size
        steps = engine_module.TRTLLMMLAMultiStepDraftBackend(runner, topk=1, speculative_num_steps=STEPS)
        for step in steps.attn_backends:
            step._run_decode_kernel = _run_decode_kernel
        return steps

    @staticmethod
    def kernel_inputs(metadata: Any, batch: Any, live: int) -> dict[str, Tensor]:
        lengths = metadata.seq_lens_k
        return {
            "seq_lens_k": lengths[:live],
            "block_kv_indices": used_pages(metadata.block_kv_indices, lengths, live, _PAGE),
        }

    @staticmethod
    def slots(metadata: Any, batch: Any) -> list[Tensor]:
        return in_pages(metadata.block_kv_indices, metadata.seq_lens_k, _PAGE)


def backend() -> type[AttentionBackend]:
    pages = replace(DENSE_LATENT, page_sizes=Sizes(minimum=_PAGE, maximum=_PAGE))
    return backend_class(__name__, TRTLLMMLAMultiStepDraftBackend, pages, DraftAttention)


def _run_decode_kernel(
    *, query: Tensor, kv_cache: Tensor, block_tables: Tensor, seq_lens: Tensor, layer: Any, **_: Any
) -> Tensor:
    """Replaces TRTLLM-gen's kernel, for one query per row, which sees all tokens up to the length."""
    asked, latents = query[:, 0], kv_cache.flatten(0, -2)[:, None]
    out = asked.new_empty(*asked.shape[:2], layer.v_head_dim)
    rows = partial(in_pages, block_tables, seq_lens, _PAGE)
    attend(out, asked, latents, latents[..., : layer.v_head_dim], rows, (block_tables, seq_lens), layer.scaling)
    return out[:, None]

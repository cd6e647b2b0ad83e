"""SGLang's draft backend for DeepSeek-V4, for a draft whose layers have a window and no compressed text."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from attn_backends import AttentionBackend, Feature, Sizes
from builders import HostLengths
from engine_kits.sglang.builder import DraftAttention, PlannedSteps
from engine_kits.sglang.stand_in import STEPS
from engine_kits.subjects import LATENT, backend_class


class DeepseekV4MultiStepBackend(PlannedSteps):
    host_lengths = HostLengths.NONE

    @staticmethod
    def make(runner: Any) -> Any:
        import sglang.srt.layers.attention.deepseek_v4_backend as engine_module
        from sglang.srt.mem_cache.deepseek_v4_memory_pool import DeepSeekV4TokenToKVPool

        # SGLang supports one window size, and one page size, which only compressed text uses.
        vars(engine_module)["SWA_WINDOW"] = window = runner.layer.sliding_window_size + 1
        runner.page_size, runner.hisparse_coordinator = 256, None
        pool = object.__new__(DeepSeekV4TokenToKVPool)
        slots = runner.req_to_token_pool.req_to_token.numel() + 256
        vars(pool).update(
            present_ratios=(),
            swa_page_size=window,
            full_to_swa_index_mapping=torch.arange(slots),
            request_window=None,
            swa_req_ring_size=None,
            get_swa_key_layout=lambda: SimpleNamespace(is_interleaved=False),
            translate_loc_from_full_to_swa=lambda slots: slots,
        )
        runner.token_to_kv_pool = pool
        return engine_module.DeepseekV4MultiStepBackend(runner, topk=1, speculative_num_steps=STEPS)

    @staticmethod
    def kernel_inputs(metadata: Any, batch: Any, live: int) -> dict[str, Tensor]:
        core = metadata.core_attn_metadata
        return {
            "seq_lens_casual": core.seq_lens_casual[:live],
            "positions_casual": core.positions_casual[:live],
            "swa_topk_lengths": core.swa_topk_lengths[:live],
        }

    @staticmethod
    def slots(metadata: Any, batch: Any) -> list[Tensor]:
        # Its kernel gets the newest token first.
        core = metadata.core_attn_metadata
        lengths = core.swa_topk_lengths.tolist()
        return [row[:length].flip(0) for row, length in zip(core.swa_page_indices, lengths, strict=True)]


def backend() -> type[AttentionBackend]:
    windows = replace(
        LATENT,
        head_dims=Sizes(minimum=512, maximum=512),
        page_sizes=Sizes(minimum=64, maximum=64),
        required=frozenset({Feature.SLIDING_WINDOW}),
    )
    return backend_class(__name__, DeepseekV4MultiStepBackend, windows, DraftAttention)

"""Drafts in published shapes, loaded by their own loaders from checkpoints of random numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from attn_backends.kernels.linear.linear import linear
from spec_decode.model_api import Attention, DraftModel, LayerGroup, TargetModel, TargetStates
from spec_decode.models import deepseek_v4, dflash, dflash2, eagle, eagle3, mtp
from spec_decode.models.checkpoints.store import SPREAD, RandomStore
from spec_decode.models.quantise import quantise_draft

_ATTENTION = [f"self_attn.{part}_proj.weight" for part in "qkvo"]
_MLP = [f"mlp.{part}_proj.weight" for part in ("gate", "up", "down")]


class HeadOnlyTarget(TargetModel):
    """The parts of its target that a draft uses: embedding and output projection."""

    def __init__(self, vocab: int, hidden: int, target_size: int, positions: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.vocab_size, self.hidden_size, self.max_positions = vocab, hidden, positions
        self.target_states_size = target_size
        self.embed = nn.Embedding(vocab, hidden, dtype=dtype)
        self.lm_head = nn.Linear(hidden, vocab, bias=False, dtype=dtype)
        self.requires_grad_(False)

    @property
    def output_projection(self) -> torch.Tensor:
        """[V, H]."""
        return self.lm_head.weight

    def layer_groups(self, page_size: int) -> list[LayerGroup]:
        """Return no groups: there are no layers."""
        return []

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, attention: Attention) -> TargetStates:
        """Return the embedding in place of the layers' output."""
        states = self.embed(token_ids)
        return TargetStates(states, states)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [T, H]; logits [T, V]."""
        return linear(hidden, self.lm_head.weight)


@dataclass(frozen=True, kw_only=True, slots=True)
class RandomDraft:
    """A draft's shape, and the rounds to time. config: as in config.json. num_target_states: hidden states per token.

    backends: to draft with; the first is timed in every strategy. draft_weights: for `quantise_draft`; None: in dtype.
    """

    description: str
    kind: Any
    config: dict[str, Any]
    names: tuple[str, ...] = ()
    num_target_states: int = 1
    page_size: int = 16
    backends: tuple[str, ...] = ("triton_paged", "flash_attn3", "flashinfer")
    dtype: torch.dtype = torch.bfloat16
    draft_weights: str | None = None
    num_reqs: tuple[int, ...] = (1, 4, 16, 32)
    num_speculative_tokens: tuple[int, ...] = (3, 7)
    context: int = 1024

    @property
    def name(self) -> str:
        """The target and the kind of draft, in a few words."""
        return self.description.partition(":")[0]

    def make(self, device: torch.device) -> DraftModel:
        """Make the draft, over a target with only embedding and head."""
        vocab, hidden, dtype = self.config["vocab_size"], self.config["hidden_size"], self.dtype
        with torch.device(device):
            target = HeadOnlyTarget(
                vocab, hidden, self.num_target_states * hidden, self.config["max_position_embeddings"], dtype
            )
        for parameter in target.parameters():
            parameter.normal_(0, SPREAD)
        store = RandomStore(self.config, list(self.names), device)
        draft: DraftModel = self.kind.load(store, target, dtype=dtype, device=device)
        if self.draft_weights is not None:
            quantise_draft(draft, self.draft_weights)
        return draft


def _llama(hidden: int, intermediate: int, heads: int, kv_heads: int, dim: int, vocab: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"], "vocab_size": vocab, "hidden_size": hidden,
        "intermediate_size": intermediate, "num_hidden_layers": 1, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "head_dim": dim, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
    }  # fmt: skip


_GLM_FLASH = {
    "architectures": ["Glm4MoeLiteForCausalLM"], "vocab_size": 154880, "hidden_size": 2048, "intermediate_size": 10240,
    "moe_intermediate_size": 1536, "num_hidden_layers": 47, "num_nextn_predict_layers": 1, "num_attention_heads": 20,
    "n_routed_experts": 64, "n_shared_experts": 1, "num_experts_per_tok": 4, "routed_scaling_factor": 1.8,
    "first_k_dense_replace": 1, "q_lora_rank": 768, "kv_lora_rank": 512, "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64, "v_head_dim": 256, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "max_position_embeddings": 4096,
}  # fmt: skip
_DEEPSEEK_V4 = {
    "architectures": ["DeepseekV4ForCausalLM"], "vocab_size": 129280, "hidden_size": 4096,
    "moe_intermediate_size": 2048, "num_hidden_layers": 43, "num_nextn_predict_layers": 1, "num_attention_heads": 64,
    "num_key_value_heads": 1, "head_dim": 512, "qk_rope_head_dim": 64, "q_lora_rank": 1024, "o_lora_rank": 1024,
    "o_groups": 8, "sliding_window": 128, "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 6,
    "scoring_func": "sqrtsoftplus", "routed_scaling_factor": 1.5, "swiglu_limit": 10.0, "hc_mult": 4,
    "hc_sinkhorn_iters": 20, "hc_eps": 1e-6, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
    "max_position_embeddings": 4096,
}  # fmt: skip
_EAGLE = ("fc.weight", "layers.0.post_attention_layernorm.weight", *(f"layers.0.{n}" for n in (*_ATTENTION, *_MLP)))
_EAGLE3 = (
    *("fc.weight", "d2t", "norm.weight", "lm_head.weight"),
    *(f"midlayer.{part}.weight" for part in ("input_layernorm", "hidden_norm", "post_attention_layernorm")),
    *(f"midlayer.{name}" for name in (*_ATTENTION, *_MLP)),
)

_LATENT_EAGLE3 = tuple(name for name in _EAGLE3 if "self_attn" not in name)
_PEAGLE = (
    *(*_EAGLE3, eagle3.MASK_HIDDEN),
    *(f"layers.{layer}.{name}" for layer in range(1, 4) for name in (*_ATTENTION, *_MLP)),
)
_DFLASH = (
    *("fc.weight", "hidden_norm.weight", "norm.weight", "layers.0.input_layernorm.weight"),
    *(f"layers.0.self_attn.{part}_norm.weight" for part in "qk"),
    *(f"layers.{layer}.{name}" for layer in range(5) for name in (*_ATTENTION, *_MLP)),
)

RANDOM_DRAFTS = {
    "llama3-8b-eagle": RandomDraft(
        description="Llama-3-8B's EAGLE draft: hidden size 4096, 128k vocabulary",
        kind=eagle,
        config=_llama(4096, 14336, 32, 8, 128, 128256),
        names=_EAGLE,
    ),
    "qwen3-8b-eagle3": RandomDraft(
        description="Qwen3-8B's EAGLE-3 draft: hidden size 4096, own 32k vocabulary",
        kind=eagle3,
        config={**_llama(4096, 12288, 32, 8, 128, 151936), "draft_vocab_size": 32000},
        names=_EAGLE3,
        num_target_states=3,
    ),
    "gpt-oss-20b-eagle3": RandomDraft(
        description="an EAGLE-3 draft for GPT-OSS-20B: hidden size 2880, head_dim 64, own 64k vocabulary",
        kind=eagle3,
        config={**_llama(2880, 17280, 64, 8, 64, 201088), "draft_vocab_size": 64000},
        names=_EAGLE3,
        num_target_states=3,
    ),
    "kimi-k2-eagle3": RandomDraft(
        description="an EAGLE-3 draft in Kimi-K2's sizes: dense MLA, 64 heads, hidden size 7168, own 32k vocabulary",
        kind=eagle3,
        config={
            **_llama(7168, 18432, 64, 64, 192, 163840),
            "architectures": ["Eagle3DeepseekV2ForCausalLM"],
            **{"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64},
            **{"v_head_dim": 128, "draft_vocab_size": 32000},
        },
        names=_LATENT_EAGLE3,
        num_target_states=3,
        page_size=64,
        backends=("triton_mla",),
    ),
    "glm-4.7-flash-mtp": RandomDraft(
        description="GLM-4.7-Flash's MTP layer: dense MLA, 64 experts, 4 per token",
        kind=mtp,
        config=_GLM_FLASH,
        names=("model.layers.47.eh_proj.weight",),
        page_size=64,
        backends=("triton_mla",),
    ),
    "deepseek-v4-mtp": RandomDraft(
        description="DeepSeek-V4's MTP layer: sparse sliding-window MLA, 256 experts, 6 per token",
        kind=deepseek_v4,
        config=_DEEPSEEK_V4,
        num_target_states=4,
        page_size=64,
        backends=("sparse_swa_mla", "flashmla_sparse"),
    ),
    "eagle-1024": RandomDraft(
        description="an EAGLE draft: hidden size 1024, 32k vocabulary",
        kind=eagle,
        config=_llama(1024, 2816, 8, 2, 128, 32000),
        names=_EAGLE,
    ),
    "drafter-tiny": RandomDraft(
        description="an EAGLE draft small enough for the CPU's graph emulator",
        kind=eagle,
        config=_llama(64, 96, 4, 2, 64, 256),
        names=_EAGLE,
        backends=("triton_paged",),
        dtype=torch.float32,
        num_reqs=(1, 4),
        num_speculative_tokens=(4,),
        context=64,
    ),
}
"""By the name of their bench case."""
PUBLISHED_DRAFTS = {name: draft for name, draft in RANDOM_DRAFTS.items() if name != "drafter-tiny"}
"""Drafts in published shapes, which need a GPU."""

BLOCK_DRAFTS = {
    "llama3-8b-peagle": RandomDraft(
        description="a P-EAGLE draft for Llama-3-8B: four layers, hidden size 4096, own 32k vocabulary",
        kind=eagle3,
        config={
            **_llama(4096, 14336, 32, 8, 128, 128256),
            **{"num_hidden_layers": 4, "draft_vocab_size": 32000, "ptd_token_id": 128002},
        },
        names=_PEAGLE,
        num_target_states=3,
        num_speculative_tokens=(3, 7, 15),
    ),
    "gpt-oss-20b-peagle": RandomDraft(
        description="a P-EAGLE draft for GPT-OSS-20B: four layers, hidden size 2880, head_dim 64, own 64k vocabulary",
        kind=eagle3,
        config={
            **_llama(2880, 17280, 64, 8, 64, 201088),
            **{"num_hidden_layers": 4, "draft_vocab_size": 64000, "ptd_token_id": 200002},
        },
        names=_PEAGLE,
        num_target_states=3,
        num_speculative_tokens=(3, 7, 15),
    ),
    "qwen3-8b-dflash": RandomDraft(
        description="Qwen3-8B's DFlash draft: five layers over the states of five, hidden size 4096, 152k vocabulary",
        kind=dflash,
        config={
            **_llama(4096, 12288, 32, 8, 128, 151936),
            **{"num_hidden_layers": 5},
            "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]},
        },
        names=_DFLASH,
        num_target_states=5,
        num_speculative_tokens=(3, 7, 15),
    ),
    "qwen3-8b-dflash2": RandomDraft(
        description="a DFlash2 draft for Qwen3-8B: DFlash with sliding windows, convolutions and 16 candidates",
        kind=dflash2,
        config={
            **_llama(4096, 12288, 32, 8, 128, 151936),
            **{"num_hidden_layers": 5, "layer_types": ["sliding_attention"] * 5, "sliding_window": 2048},
            "dflash_config": {
                "mask_token_id": 151669,
                "target_layer_ids": [1, 9, 17, 25, 33],
                "block_size": 8,
                "conv_kernel_size": 2,
                "conv_group_size": 16,
                "selector_rank": 256,
                "selector_top_k": 16,
            },
        },
        names=_DFLASH,
        num_target_states=5,
    ),
}
"""Drafts that propose all K tokens in one step, by bench case."""

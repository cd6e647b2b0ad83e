"""Tiny hybrid models of transformers, and the greedy texts that it generates with them."""

from functools import cache

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.2")

VOCAB, NEW = 12, 14
PROMPTS = [[(i * 7 + j * j + i * j) % VOCAB for j in range(2 + 5 * i)] for i in range(5)]
SIZES = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 1,
    "max_position_embeddings": 96, "initializer_range": 0.3, "bos_token_id": None, "eos_token_id": None,
    "pad_token_id": None,
}  # fmt: skip
LAYERS = {"num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "linear_attention"]}
QWEN = {
    **LAYERS, "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
}  # fmt: skip
ROUTED = {"num_experts_per_tok": 2, "moe_intermediate_size": 16, "experts_implementation": "grouped_mm"}
EXPERTS = {**ROUTED, "num_experts": 4, "shared_expert_intermediate_size": 16}
LFM2 = {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"], "conv_L_cache": 3}
NEMOTRON = {
    "layers_block_type": ["linear_attention", "mlp", "full_attention", "moe", "linear_attention"], "head_dim": 16,
    "mamba_num_heads": 4, "mamba_head_dim": 6, "ssm_state_size": 8, "n_groups": 2, "chunk_size": 5,
    "n_routed_experts": 4, "moe_shared_expert_intermediate_size": 16, **ROUTED,
}  # fmt: skip
GRANITE = {
    **LAYERS, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 5,
    "num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 16, "logits_scaling": 2.0,
    "experts_implementation": "grouped_mm", "embedding_multiplier": 3.0, "residual_multiplier": 0.5,
}  # fmt: skip
KIMI = {
    **LAYERS, **ROUTED, "num_experts": 4, "linear_num_heads": 2, "linear_head_dim": 8, "kv_lora_rank": 8,
    "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6, "num_key_value_heads": 2,
}  # fmt: skip
OLMO = {
    **LAYERS,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
}
WITH_MTP = {"Qwen3_5TextConfig": QWEN, "Qwen3NextConfig": QWEN | EXPERTS, "Qwen3_5MoeTextConfig": QWEN | EXPERTS}
"""Families that publish a layer that drafts for the model."""
FAMILIES = WITH_MTP | {
    "Lfm2Config": LFM2,
    "NemotronHConfig": NEMOTRON,
    "KimiLinearConfig": KIMI,
    "Lfm2MoeConfig": {**LFM2, **ROUTED, "num_experts": 4, "num_dense_layers": 1},
    "GraniteMoeHybridConfig": GRANITE,
    "OlmoHybridConfig": OLMO,
}


def make_model(family):
    torch.manual_seed(0)
    config = getattr(transformers, family)(**SIZES | FAMILIES[family])
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


@cache
def wanted(family):
    model = make_model(family)
    texts = []
    for prompt in PROMPTS:
        out = model.generate(torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False)
        texts.append(out[0, len(prompt) :].tolist())
    assert len(set(map(str, texts))) > 2
    return texts

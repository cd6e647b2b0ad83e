"""Tiny hybrid models of transformers, and the greedy texts that it generates with them."""

from functools import cache

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.2")

VOCAB, NEW = 12, 14
PROMPTS = [[(i * 7 + j * j + i * j) % VOCAB for j in range(2 + 5 * i)] for i in range(5)]
SIZES = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "head_dim": 16,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 96, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 6, "initializer_range": 0.3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"], "bos_token_id": None,
    "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
EXPERTS = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
    "experts_implementation": "grouped_mm",
}  # fmt: skip
FAMILIES = {"Qwen3_5TextConfig": {}, "Qwen3NextConfig": EXPERTS, "Qwen3_5MoeTextConfig": EXPERTS}


def make_model(family):
    torch.manual_seed(0)
    config = getattr(transformers, family)(**SIZES, **FAMILIES[family])
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

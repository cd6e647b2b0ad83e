"""Tiny random checkpoints of multi-token prediction, in their published layouts."""

import torch

from tests.spec_decode.models.generated import Generated, Tensors

VOCAB, HIDDEN, LAYER = 24, 32, 2

COMMON = {
    "num_hidden_layers": LAYER, "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": 40,
    "hidden_act": "silu", "max_position_embeddings": 96, "rms_norm_eps": 1e-5,
}  # fmt: skip
MIXTURE = {
    "num_nextn_predict_layers": 1, "moe_intermediate_size": 16, "n_routed_experts": 8, "n_shared_experts": 1,
    "num_experts_per_tok": 3, "norm_topk_prob": True, "routed_scaling_factor": 1.7,
}  # fmt: skip
GLM_FLASH_CONFIG = {
    **COMMON, **MIXTURE, "architectures": ["Glm4MoeLiteForCausalLM"], "attention_bias": False,
    "num_attention_heads": 3, "num_key_value_heads": 3, "q_lora_rank": 20, "kv_lora_rank": 32,
    "qk_nope_head_dim": 12, "qk_rope_head_dim": 16, "v_head_dim": 10, "first_k_dense_replace": 1,
    "topk_method": "noaux_tc", "n_group": 1, "topk_group": 1,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0, "partial_rotary_factor": 1.0},
}  # fmt: skip
V3_CONFIG = {
    **{name: value for name, value in GLM_FLASH_CONFIG.items() if name != "rope_parameters"},
    "architectures": ["DeepseekV3ForCausalLM"], "n_shared_experts": 2, "n_group": 4, "topk_group": 2,
    "scoring_func": "sigmoid", "rope_theta": 10000,
    "rope_scaling": {
        "type": "yarn", "factor": 8, "original_max_position_embeddings": 12, "beta_fast": 4, "beta_slow": 0.5,
        "mscale": 0.7, "mscale_all_dim": 1.0,
    },
}  # fmt: skip
V4_CONFIG = {
    **COMMON, **MIXTURE, "architectures": ["DeepseekV4ForCausalLM"], "rms_norm_eps": 1e-6, "num_attention_heads": 4,
    "num_key_value_heads": 1, "head_dim": 64, "qk_rope_head_dim": 16, "q_lora_rank": 20, "o_lora_rank": 10,
    "o_groups": 2, "sliding_window": 6, "rope_theta": 10000,
    "rope_scaling": {"type": "yarn", "factor": 16, "original_max_position_embeddings": 8},
    "compress_rope_theta": 160000, "compress_ratios": [0, 4, 0], "hc_mult": 4, "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6, "scoring_func": "sqrtsoftplus", "routed_scaling_factor": 1.5, "swiglu_limit": 0.6,
}  # fmt: skip
SIZES = {**COMMON, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 12}
QWEN_TEXT = {
    **SIZES, "mtp_num_hidden_layers": 1, "attention_bias": False, "partial_rotary_factor": 0.9,
    # Its rotated part takes precedence over the field next to it.
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 300.0, "partial_rotary_factor": 2 / 3, "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
}  # fmt: skip
QWEN_CONFIG = {"architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": QWEN_TEXT}
QWEN_MOE_CONFIG = {
    **QWEN_TEXT, "architectures": ["Qwen3NextForCausalLM"], "num_experts": 8, "num_experts_per_tok": 3,
    "moe_intermediate_size": 16, "shared_expert_intermediate_size": 24, "norm_topk_prob": True,
}  # fmt: skip
MIMO_CONFIG = {
    **SIZES, "architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1, "attention_bias": True,
    "rope_theta": 640000.0,
}  # fmt: skip
GLM_CONFIG = {
    **SIZES, **MIXTURE, "architectures": ["Glm4MoeForCausalLM"], "attention_bias": True, "use_qk_norm": True,
    "rope_theta": 500.0, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "partial_rotary_factor": 0.5,
}  # fmt: skip
PARTS = {
    "Qwen": ("mtp.", "layers.0.", "fc", ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")),
    "MiMo": ("model.mtp_layers.0.", "", "input_proj", ("token_layernorm", "hidden_layernorm", "final_layernorm")),
}
"""By prefix of the architecture: the name prefixes of the draft and of its layer, the projection, and the norms of the
embedding, of the state and after the layer."""


def parts_of(config, module):
    """Return the names of one drafting layer; DeepSeek-V3's are GLM's too."""
    deepseeks = f"model.layers.{LAYER + module}.", "", "eh_proj", ("enorm", "hnorm", "shared_head.norm")
    return PARTS.get(config["architectures"][0][:4], deepseeks)


def make_mtp(config, *, own=False):
    """Make as many drafting layers as the config says. own: with embedding and head."""
    text = config.get("text_config", config)
    modules = [module_tensors(config, module, own) for module in range(text.get("num_nextn_predict_layers", 1))]
    return Generated(config, {name: tensor for tensors in modules for name, tensor in tensors.items()})


def module_tensors(config, module=0, own=False):
    """Return the tensors of one drafting layer."""
    family, text = config["architectures"][0][:4], config.get("text_config", config)
    prefix, layer, fuse, norms = parts_of(config, module)
    make, hidden = Tensors(module, prefix, around=0.0 if family == "Qwen" else 1.0), text["hidden_size"]
    make.norms(hidden, *norms)
    make.matrix(fuse, hidden, 2 * hidden)
    make.layer(layer, text, qkv_bias=text["attention_bias"], qk_norm=family != "MiMo", gate=family == "Qwen")
    if own:
        make.matrix("embed_tokens", text["vocab_size"], hidden)
        make.matrix("shared_head.head", text["vocab_size"], hidden)
    return make.drawn


def make_v4(config=V4_CONFIG):
    make, hidden, streams = Tensors(0, "mtp.0."), config["hidden_size"], config["hc_mult"]
    heads, dim, groups = config["num_attention_heads"], config["head_dim"], config["o_groups"]
    q_rank, out_rank, count = config["q_lora_rank"], config["o_lora_rank"], config["n_routed_experts"]
    make.norms(hidden, "enorm", "hnorm", "norm", "attn_norm", "ffn_norm")
    make.norms(q_rank, "attn.q_norm")
    make.norms(dim, "attn.kv_norm")
    for name, *shape in (
        ("e_proj", hidden, hidden), ("h_proj", hidden, hidden), ("attn.wq_a", q_rank, hidden),
        ("attn.wq_b", heads * dim, q_rank), ("attn.wkv", dim, hidden),
        ("attn.wo_a", groups * out_rank, heads * dim // groups), ("attn.wo_b", hidden, groups * out_rank),
    ):  # fmt: skip
        make.matrix(name, *shape)
    make.draw("attn.attn_sink", heads)
    inner, names = config["moe_intermediate_size"], ("w1", "w3", "w2")
    make.experts("ffn.", count, inner, hidden, names)
    make.gated("ffn.shared_experts.", inner * config["n_shared_experts"], hidden, names)
    make.draw("ffn.gate.bias", count, scale=0.5)
    block = streams * (2 + streams)
    for name, mixes, scales in (("attn", block, 3), ("ffn", block, 3), ("head", streams, 1)):
        make.draw(f"hc_{name}_fn", mixes, streams * hidden, scale=1.5 * (streams * hidden) ** -0.5)
        make.draw(f"hc_{name}_base", mixes)
        make.drawn[f"mtp.0.hc_{name}_scale"] = 0.7 + torch.arange(scales) / 4
    return Generated(config, make.drawn)

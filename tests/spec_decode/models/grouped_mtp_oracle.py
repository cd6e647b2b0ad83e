"""Multi-token prediction over grouped heads: tiny checkpoints as Qwen, MiMo and GLM-4.5 publish them, and the layer in
fp64 from their tensors, one head and expert at a time."""

import math

import torch

from tests.spec_decode.models.generated_mtp import HIDDEN, LAYER, VOCAB, _gated, _mixture, _Random
from tests.spec_decode.models.plain import gated, in_fp64, mixture, rms

NAMES = ("gate_proj", "up_proj", "down_proj")
SIZES = {
    "num_hidden_layers": LAYER, "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": 40,
    "hidden_act": "silu", "max_position_embeddings": 96, "rms_norm_eps": 1e-5, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 12,
}  # fmt: skip
QWEN_TEXT = {
    **SIZES, "mtp_num_hidden_layers": 1, "attention_bias": False, "partial_rotary_factor": 0.9,
    # What it says of the part that is rotated goes before what stands beside it.
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
    **SIZES, "architectures": ["Glm4MoeForCausalLM"], "num_nextn_predict_layers": 1, "attention_bias": True,
    "use_qk_norm": True, "rope_theta": 500.0, "first_k_dense_replace": 1, "moe_intermediate_size": 16,
    "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 3, "n_group": 1, "topk_group": 1,
    "norm_topk_prob": True, "routed_scaling_factor": 1.7, "partial_rotary_factor": 0.5,
}  # fmt: skip
PREFIXES = {"Qwen": "mtp.", "MiMo": "model.mtp_layers.0.", "Glm4": f"model.layers.{LAYER}."}
PARTS = {
    "Qwen": ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm", "layers.0."),
    "MiMo": ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm", ""),
    "Glm4": ("enorm", "hnorm", "eh_proj", "shared_head.norm", ""),
}
"""By the beginning of the architecture: norm of the embedding, of the state, projection, last norm, the layer."""


def family_of(config):
    return config["architectures"][0][:4]


def grouped_modules(config):
    """The tensors of as many layers that draft as the config says."""
    modules = range(config["num_nextn_predict_layers"])
    return {name: t for module in modules for name, t in grouped_tensors(config, module=module).items()}


def grouped_tensors(config, *, own=False, fused=False, module=0):
    """A layer's tensors. own: with embedding and head. fused: experts in one tensor."""
    family, text = family_of(config), config.get("text_config", config)
    make, hidden = _Random(module), HIDDEN
    heads, kv_heads, dim = (text[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    token_norm, state_norm, fuse, last, block = PARTS[family]
    around = 1.0 if family == "Qwen" else 0.0
    tensors = {f"{name}.weight": make.norm(hidden) - around for name in (token_norm, state_norm, last)}
    tensors |= {f"{fuse}.weight": make.matrix(hidden, 2 * hidden)}
    rows = {"q": heads * dim * (2 if family == "Qwen" else 1), "k": kv_heads * dim, "v": kv_heads * dim}
    layer = {f"self_attn.{part}_proj.weight": make.matrix(count, hidden) for part, count in rows.items()}
    if text["attention_bias"]:
        layer |= {f"self_attn.{part}_proj.bias": make.bias(count) / 3 for part, count in rows.items()}
    if family != "MiMo":
        layer |= {f"self_attn.{part}_norm.weight": make.norm(dim) - around for part in "qk"}
    layer["self_attn.o_proj.weight"] = make.matrix(hidden, heads * dim)
    layer |= {f"{name}_layernorm.weight": make.norm(hidden) - around for name in ("input", "post_attention")}
    if family == "Glm4":
        layer |= _mixture(make, config, "mlp.", NAMES, "gate.e_score_correction_bias")
    elif "num_experts" in text:
        named = {**text, "n_routed_experts": text["num_experts"], "n_shared_experts": 1}
        made = _mixture(make, named, "mlp.", NAMES, "none")
        layer |= {name: t for name, t in made.items() if "shared" not in name and "none" not in name}
        layer |= _gated(make, "mlp.shared_expert.", NAMES, text["shared_expert_intermediate_size"], hidden)
        layer["mlp.shared_expert_gate.weight"] = make.matrix(1, hidden)
        layer = in_one(layer) if fused else layer
    else:
        layer |= _gated(make, "mlp.", NAMES, text["intermediate_size"], hidden)
    tensors |= {block + name: tensor for name, tensor in layer.items()}
    if own:
        tensors["embed_tokens.weight"] = make.matrix(VOCAB, hidden)
        tensors["shared_head.head.weight"] = make.matrix(VOCAB, hidden)
    prefix = f"model.layers.{LAYER + module}." if family == "Glm4" else PREFIXES[family]
    return {prefix + name: tensor for name, tensor in tensors.items()}


def in_one(layer):
    """The experts' tensors stacked, gate above up."""
    found = {name: tensor for name, tensor in layer.items() if "experts." not in name}
    parts = {part: torch.stack([layer[f"mlp.experts.{index}.{part}.weight"] for index in range(8)]) for part in NAMES}
    found["mlp.experts.gate_up_proj"] = torch.cat([parts["gate_proj"], parts["up_proj"]], 1)
    found["mlp.experts.down_proj"] = parts["down_proj"]
    return found


class GroupedOracle:
    """A layer that drafts, by its definition, over a whole text."""

    def __init__(self, config, tensors, target, module=0):
        self.family, self.config = family_of(config), config.get("text_config", config)
        prefix = f"model.layers.{LAYER + module}." if self.family == "Glm4" else PREFIXES[self.family]
        self.weight, self.eps, self.target = in_fp64(tensors, prefix), self.config["rms_norm_eps"], target
        self.around = 1.0 if self.family == "Qwen" else 0.0
        self.parts = PARTS[self.family]
        self.block = in_fp64(self.weight, self.parts[-1])

    def normed(self, x, weight):
        return rms(x, self.eps) * (weight + self.around)

    def rotated(self, head):
        """head [T, D] with its first dims turned: i and i + half of them are a complex number."""
        rope = self.config.get("rope_parameters", {})
        part = rope.get("partial_rotary_factor", self.config.get("partial_rotary_factor", 1.0))
        theta, dims = rope.get("rope_theta", self.config.get("rope_theta")), round(part * head.shape[1])
        half = dims // 2
        angles = torch.outer(torch.arange(len(head)).double(), theta ** (-torch.arange(half).double() / half))
        turned = torch.complex(head[:, :half], head[:, half:dims]) * torch.polar(torch.ones_like(angles), angles)
        return torch.cat([turned.real, turned.imag, head[:, dims:]], -1)

    def projected(self, x, part):
        out = x @ self.block[f"self_attn.{part}_proj.weight"].T
        return out + self.block.get(f"self_attn.{part}_proj.bias", 0)

    def attention(self, x):
        heads, kv_heads, dim = 6, 2, 12
        query, key, value = (self.projected(x, part) for part in "qkv")
        query, key, value = query.view(len(x), heads, -1), key.view(len(x), kv_heads, dim), value.view(len(x), -1, dim)
        query, gate = query[..., :dim], query[..., dim:]
        if "self_attn.q_norm.weight" in self.block:
            query = self.normed(query, self.block["self_attn.q_norm.weight"])
            key = self.normed(key, self.block["self_attn.k_norm.weight"])
        out = torch.zeros(len(x), heads, dim).double()
        for head in range(heads):
            shared = head // (heads // kv_heads)
            queries, keys = self.rotated(query[:, head]), self.rotated(key[:, shared])
            scores = queries @ keys.T * dim**-0.5
            unseen = torch.ones_like(scores, dtype=torch.bool).triu(1)
            out[:, head] = scores.masked_fill(unseen, -math.inf).softmax(-1) @ value[:, shared]
        out = out * gate.sigmoid() if self.family == "Qwen" else out
        return out.flatten(1) @ self.block["self_attn.o_proj.weight"].T

    def feed_forward(self, x):
        weight = in_fp64(self.block, "mlp.")
        if self.family == "Glm4":
            return mixture(x, self.config, weight, NAMES, "gate.e_score_correction_bias")
        if "num_experts" not in self.config:
            return gated(x, weight, "", NAMES)
        out = []
        for row in x:
            scores = (weight["gate.weight"] @ row).softmax(0)
            best = sorted(range(len(scores)), key=lambda expert: -float(scores[expert]))[:3]
            total = (weight["shared_expert_gate.weight"] @ row).sigmoid() * gated(row, weight, "shared_expert.", NAMES)
            for expert in best:
                share = scores[expert] / scores[best].sum()
                total = total + share * gated(row, weight, f"experts.{expert}.", NAMES)
            out.append(total)
        return torch.stack(out)

    def states(self, ids, hidden):
        token_norm, state_norm, fuse, last, _ = self.parts
        table = self.weight.get("embed_tokens.weight", self.target.embed.weight.double())
        token = self.normed(table[ids], self.weight[f"{token_norm}.weight"])
        state = self.normed(hidden.double(), self.weight[f"{state_norm}.weight"])
        both = [state, token] if self.family == "MiMo" else [token, state]
        x = torch.cat(both, -1) @ self.weight[f"{fuse}.weight"].T
        x = x + self.attention(self.normed(x, self.block["input_layernorm.weight"]))
        x = x + self.feed_forward(self.normed(x, self.block["post_attention_layernorm.weight"]))
        return self.normed(x, self.weight[f"{last}.weight"])

    def logits(self, states):
        head = self.weight.get("shared_head.head.weight", self.target.lm_head.weight.double())
        return states.double() @ head.T

"""Multi-token prediction of DeepSeek-V3 and GLM-4.7-Flash in fp64, from tensors by their published names."""

import math

import torch

from tests.spec_decode.models.plain import gated, in_fp64, mixture, rms, turn


class MtpOracle:
    """A layer that drafts, by its definition: a key and a value for every head, over a whole text."""

    def __init__(self, config, tensors, target, module=0):
        self.config, self.eps, self.target = config, config["rms_norm_eps"], target
        self.weight = in_fp64(tensors, f"model.layers.{config['num_hidden_layers'] + module}.")

    def normed(self, x, name):
        return rms(x, self.eps) * self.weight[f"{name}.weight"]

    def angles(self, count):
        """Angles [count, pairs], and the factor on the attention's scale. Rotated dims have a factor of their own."""
        config, pairs = self.config, self.config["qk_rope_head_dim"] // 2
        if "rope_scaling" not in config:
            frequency = config["rope_parameters"]["rope_theta"] ** (-torch.arange(pairs).double() / pairs)
            return torch.arange(count).double()[:, None] * frequency, 1.0, 1.0
        yarn, theta, frequency = config["rope_scaling"], config["rope_theta"], []
        ends = [
            pairs * math.log(yarn["original_max_position_embeddings"] / (turns * 2 * math.pi)) / math.log(theta)
            for turns in (yarn["beta_fast"], yarn["beta_slow"])
        ]
        low, high = max(math.floor(ends[0]), 0), min(math.ceil(ends[1]), 2 * pairs - 1)
        for pair in range(pairs):
            slowed = min(max((pair - low) / (high - low), 0), 1)
            plain = theta ** (-pair / pairs)
            frequency.append(plain / yarn["factor"] * slowed + plain * (1 - slowed))
        size = {name: 0.1 * yarn[name] * math.log(yarn["factor"]) + 1 for name in ("mscale", "mscale_all_dim")}
        angles = torch.arange(count).double()[:, None] * torch.tensor(frequency).double()
        return angles, size["mscale_all_dim"] ** 2, size["mscale"] / size["mscale_all_dim"]

    def attention(self, x):
        config, weight = self.config, self.weight
        heads, nope, rank = config["num_attention_heads"], config["qk_nope_head_dim"], config["kv_lora_rank"]
        angles, factor, amplitude = self.angles(len(x))
        if config["q_lora_rank"] is None:
            query = x @ weight["self_attn.q_proj.weight"].T
        else:
            narrow = self.normed(x @ weight["self_attn.q_a_proj.weight"].T, "self_attn.q_a_layernorm")
            query = narrow @ weight["self_attn.q_b_proj.weight"].T
        query = query.view(len(x), heads, -1)
        query = torch.cat([query[..., :nope], turn(query[..., nope:], angles) * amplitude], -1)
        latent = x @ weight["self_attn.kv_a_proj_with_mqa.weight"].T
        shared = turn(latent[:, rank:], angles) * amplitude
        up = self.normed(latent[:, :rank], "self_attn.kv_a_layernorm") @ weight["self_attn.kv_b_proj.weight"].T
        up = up.view(len(x), heads, -1)
        out = torch.zeros(len(x), heads, config["v_head_dim"]).double()
        for head in range(heads):
            key = torch.cat([up[:, head, :nope], shared], -1)
            scores = query[:, head] @ key.T * key.shape[1] ** -0.5 * factor
            unseen = torch.ones_like(scores, dtype=torch.bool).triu(1)
            out[:, head] = scores.masked_fill(unseen, -math.inf).softmax(-1) @ up[:, head, nope:]
        return out.flatten(1) @ weight["self_attn.o_proj.weight"].T

    def feed_forward(self, x):
        weight, names = in_fp64(self.weight, "mlp."), ("gate_proj", "up_proj", "down_proj")
        if self.config.get("n_routed_experts") is None:
            return gated(x, weight, "", names)
        return mixture(x, self.config, weight, names, "gate.e_score_correction_bias")

    def states(self, ids, hidden):
        table = self.weight.get("embed_tokens.weight", self.target.embed.weight.double())
        both = [self.normed(table[ids], "enorm"), self.normed(hidden.double(), "hnorm")]
        x = torch.cat(both, -1) @ self.weight["eh_proj.weight"].T
        x = x + self.attention(self.normed(x, "input_layernorm"))
        x = x + self.feed_forward(self.normed(x, "post_attention_layernorm"))
        return self.normed(x, "shared_head.norm")

    def logits(self, states):
        head = self.weight.get("shared_head.head.weight", self.target.lm_head.weight.double())
        return states.double() @ head.T

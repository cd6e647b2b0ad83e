"""The published models in plain torch: whole sequences, dense causal attention, tensors by their published names.

fp64 gives the correct result, fp32 the error of rounding.

Legend: n positions, H hidden size, F size of the target's states, K tokens of a round, V vocabulary.
"""

import math

import torch

from tests.spec_decode.models.generated import GATED
from tests.spec_decode.models.generated_mtp import parts_of
from tests.spec_decode.models.plain import attend, attend_latents, gated, mixture, rms, turn, turn_halves, under


def llama3(frequency, rope):
    length, factor = 2 * math.pi / frequency, rope["factor"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    original = rope["original_max_position_embeddings"]
    if length < original / high:
        return frequency
    if length > original / low:
        return frequency / factor
    smooth = (original / length - low) / (high - low)
    return (1 - smooth) * frequency / factor + smooth * frequency


def yarn(frequencies, theta, rope):
    """Divide low frequencies by the factor."""
    pairs, found = len(frequencies), []
    ends = [
        pairs * math.log(rope["original_max_position_embeddings"] / (turns * 2 * math.pi)) / math.log(theta)
        for turns in (rope["beta_fast"], rope["beta_slow"])
    ]
    low, high = max(math.floor(ends[0]), 0), min(math.ceil(ends[1]), 2 * pairs - 1)
    for pair, plain in enumerate(frequencies):
        slowed = min(max((pair - low) / (high - low), 0), 1)
        found.append(plain / rope["factor"] * slowed + plain * (1 - slowed))
    return found


def padded(table, rows):
    """Append rows of zeros for tokens of the target that a draft's table lacks."""
    return torch.nn.functional.pad(table, (0, 0, 0, max(0, rows - len(table))))


class Published:
    """Functions of the published tensors of one checkpoint.

    layers  of each layer its window, None for none; of a block's also whether it is causal
    prefix  of the names of the tensors
    """

    around = 0.0
    """Added to a norm's weight."""
    rotated = 1.0
    """Rotated share of a head, unless the config states it."""
    own_head = "lm_head.weight"

    def __init__(self, checkpoint, target, layers, dtype, prefix=""):
        self.config = checkpoint.config.get("text_config", checkpoint.config)
        self.layers, self.dtype, self.vocab_size = layers, dtype, target.vocab_size
        self.tensors = under(checkpoint.tensors, prefix, dtype)
        self.d2t = checkpoint.tensors.get("d2t")
        own = self.tensors.get("embed_tokens.weight")
        self.embedding = padded(target.embed.weight.to(dtype) if own is None else own, self.vocab_size)
        self.head = self.tensors.get(self.own_head)
        if self.head is None:
            tied = own is not None and self.config.get("tie_word_embeddings")
            self.head = own if tied else target.lm_head.weight.to(dtype)
            if self.d2t is not None:
                self.head = self.head[self.d2t + torch.arange(len(self.d2t))]

    def drafts(self, ids, target_hidden_states, steps):
        """Draft greedily after input tokens ids [n] with target states [n, F]: scores [K, V] of each token, and the
        draft's probability [K] of the best one."""
        raise NotImplementedError

    def linear(self, name, x):
        return x @ self.tensors[f"{name}.weight"].T + self.tensors.get(f"{name}.bias", 0)

    def norm(self, name, x):
        return rms(x, self.config["rms_norm_eps"]) * (self.tensors[f"{name}.weight"] + self.around)

    def layer(self, prefix, inputs, residual, window):
        x = residual + self.attention(f"{prefix}self_attn.", inputs, window)
        return x + self.feed_forward(f"{prefix}mlp.", self.norm(f"{prefix}post_attention_layernorm", x))

    def feed_forward(self, prefix, x):
        return gated(x, self.tensors, prefix, GATED)

    def attention(self, prefix, every, window, causal=True, count=None):
        """Attend with the last `count` of the tokens [n, H], over all of them."""
        n = len(every)
        heads, kv_heads = self.config["num_attention_heads"], self.config["num_key_value_heads"]
        query, key, value = (
            self.linear(f"{prefix}{part}_proj", every).view(n, each, -1)
            for part, each in (("q", heads), ("k", kv_heads), ("v", kv_heads))
        )
        query, gate = query.tensor_split([key.shape[-1]], -1)
        if f"{prefix}q_norm.weight" in self.tensors:
            query, key = self.norm(f"{prefix}q_norm", query), self.norm(f"{prefix}k_norm", key)
        angles = self.angles(n, key.shape[-1])
        distance = torch.arange(n)[:, None] - torch.arange(n)[None]
        unseen = (distance >= (window or n)) | ((distance < 0) & causal)
        rows = slice(-(count or n), None)
        out = attend(turn_halves(query, angles)[rows], turn_halves(key, angles), value, unseen[rows])
        return self.linear(f"{prefix}o_proj", out * gate[rows].flatten(1).sigmoid() if gate.numel() else out)

    def angles(self, count, dim):
        """[count, pairs of the dims that are rotated of `dim`]."""
        return torch.outer(torch.arange(count).double(), self.frequencies(dim)).to(self.dtype)

    def frequencies(self, dim):
        rope = self.config.get("rope_parameters") or self.config.get("rope_scaling") or {}
        dim = round(dim * rope.get("partial_rotary_factor", self.config.get("partial_rotary_factor", self.rotated)))
        theta = rope.get("rope_theta") or self.config["rope_theta"]
        plain = [theta ** (-2 * i / dim) for i in range(dim // 2)]
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind == "yarn":
            plain = yarn(plain, theta, rope)
        elif kind != "default":
            plain = [llama3(each, rope) if kind == "llama3" else each / rope["factor"] for each in plain]
        return torch.tensor(plain, dtype=torch.float64)

    def whole(self, own):
        """Scatter scores of the draft's own vocabulary to [..., V]."""
        scores = torch.full((*own.shape[:-1], self.vocab_size), -math.inf, dtype=self.dtype)
        if self.d2t is None:
            known = min(self.vocab_size, own.shape[-1])
            scores[..., :known] = own[..., :known]
            return scores
        scores[..., self.d2t + torch.arange(len(self.d2t))] = own
        return scores


class Stepwise(Published):
    """A draft that continues from its own states, or that appends masks to the text if it has a mask token."""

    def drafts(self, ids, target_hidden_states, steps):
        ids, target_hidden_states = list(ids), target_hidden_states.to(self.dtype)
        mask = self.config.get("ptd_token_id", self.config.get("pard_token"))
        if mask is None:
            scores = self.greedy(ids, self.combine(target_hidden_states), steps)
        else:
            state = self.tensors.get("mask_hidden", torch.zeros_like(target_hidden_states[0])).view(1, -1)
            hidden = self.combine(torch.cat([target_hidden_states, state.expand(steps - 1, -1)]))
            scores = self.scores(self.states([*ids, *[mask] * (steps - 1)], hidden)[-steps:])
        return scores, scores.softmax(-1).amax(-1)

    def greedy(self, ids, hidden, steps):
        scores = []
        for _ in range(steps):
            last = self.states(ids, hidden)[-1:]
            scores.append(self.scores(last)[0])
            ids, hidden = [*ids, int(scores[-1].argmax())], torch.cat([hidden, last])
        return torch.stack(scores)

    def combine(self, target_hidden_states):
        return target_hidden_states

    def states(self, ids, hidden):
        """[n, H] for a whole text."""
        raise NotImplementedError

    def scores(self, states):
        """[..., V] of states [..., H]."""
        return states @ self.head.T


class Eagle(Stepwise):
    def states(self, ids, hidden):
        x = self.linear("fc", torch.cat([self.embedding[ids], hidden], -1))
        for layer, window in enumerate(self.layers):
            prefix = f"layers.{layer}."
            x = self.layer(prefix, self.norm(f"{prefix}input_layernorm", x) if layer else x, x, window)
        return x


class Eagle3(Stepwise):
    def __init__(self, checkpoint, target, layers, dtype):
        super().__init__(checkpoint, target, layers, dtype)
        self.first = "midlayer." if "midlayer.hidden_norm.weight" in self.tensors else "layers.0."
        self.feeds_normed = (self.config.get("eagle_config", {}) | self.config).get("norm_output")

    def combine(self, target_hidden_states):
        if "input_norm.weight" in self.tensors:
            target_hidden_states = self.norm("input_norm", target_hidden_states)
        if norms := [name for name in self.tensors if name.startswith("fc_norm.")]:
            each = target_hidden_states.chunk(len(norms), -1)
            target_hidden_states = torch.cat([self.norm(f"fc_norm.{i}", part) for i, part in enumerate(each)], -1)
        return self.linear("fc", target_hidden_states)

    def states(self, ids, hidden):
        normed = self.norm(f"{self.first}hidden_norm", hidden)
        inputs = torch.cat([self.norm(f"{self.first}input_layernorm", self.embedding[ids]), normed], -1)
        residual = normed if self.config.get("norm_before_residual") else hidden
        x = self.layer(self.first, inputs, residual, self.layers[0])
        for layer, window in enumerate(self.layers[1:], 1):
            x = self.layer(f"layers.{layer}.", self.norm(f"layers.{layer}.input_layernorm", x), x, window)
        return self.norm("norm", x) if self.feeds_normed else x

    def scores(self, states):
        return self.whole((states if self.feeds_normed else self.norm("norm", states)) @ self.head.T)


class LatentEagle3(Eagle3):
    """EAGLE-3 with DeepSeek's attention as `transformers` computes it, over a layer input of twice the width."""

    def attention(self, prefix, every, window):
        from transformers import DeepseekV3Config
        from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek

        config = DeepseekV3Config(**self.config, attn_implementation="eager")
        attention, parts = deepseek.DeepseekV3Attention(config, 0), under(self.tensors, prefix, self.dtype)
        for name in {"q_proj", "q_a_proj", "kv_a_proj_with_mqa"} & {name.removesuffix(".weight") for name in parts}:
            setattr(attention, name, torch.nn.Linear(*parts[f"{name}.weight"].shape[::-1], bias=False))
        attention.to(self.dtype).load_state_dict(parts)
        n = len(every)
        unseen = torch.full((n, n), -math.inf, dtype=self.dtype).triu(1)[None, None]
        angles = deepseek.DeepseekV3RotaryEmbedding(config)(every[None], torch.arange(n)[None])
        return attention(every[None], angles, unseen)[0][0]


class Causal(Stepwise):
    def combine(self, target_hidden_states):
        return torch.zeros(len(target_hidden_states), self.config["hidden_size"], dtype=self.dtype)

    def states(self, ids, hidden):
        x = padded(self.tensors["model.embed_tokens.weight"], self.vocab_size)[ids]
        for layer, window in enumerate(self.layers):
            prefix = f"model.layers.{layer}."
            x = self.layer(prefix, self.norm(f"{prefix}input_layernorm", x), x, window)
        return x

    def scores(self, states):
        head = "model.embed_tokens" if self.config.get("tie_word_embeddings") else "lm_head"
        return self.whole(self.linear(head, self.norm("model.norm", states)))


class Prediction(Stepwise):
    """A layer of multi-token prediction, with grouped heads like GLM-4.5's."""

    own_head, rotated = "shared_head.head.weight", 0.5

    def __init__(self, checkpoint, target, layers, dtype, module=0):
        """module: index among the drafting modules."""
        prefix, self.block, self.fuse, self.outer = parts_of(checkpoint.config, module)
        super().__init__(checkpoint, target, layers, dtype, prefix)

    def states(self, ids, hidden):
        before, beside, after = self.outer
        x = self.fused(self.norm(before, self.embedding[ids]), self.norm(beside, hidden))
        return self.norm(after, self.layer(self.block, self.norm(f"{self.block}input_layernorm", x), x, None))

    def fused(self, token, state):
        return self.linear(self.fuse, torch.cat([token, state], -1))

    def feed_forward(self, prefix, x):
        if self.config.get("n_routed_experts") is None:
            return super().feed_forward(prefix, x)
        weight = under(self.tensors, prefix, self.dtype)
        return mixture(x, self.config, weight, GATED, "gate.e_score_correction_bias")


class DeepseekV3(Prediction):
    """DeepSeek-V3's and GLM-4.7-Flash's: each head's key and value are made from a latent."""

    rotated = 1.0

    def attention(self, prefix, x, window):
        config, count, yarn = self.config, len(x), self.config.get("rope_scaling")
        heads, nope, rank = config["num_attention_heads"], config["qk_nope_head_dim"], config["kv_lora_rank"]
        if config["q_lora_rank"] is None:
            query = self.linear(f"{prefix}q_proj", x)
        else:
            narrow = self.norm(f"{prefix}q_a_layernorm", self.linear(f"{prefix}q_a_proj", x))
            query = self.linear(f"{prefix}q_b_proj", narrow)
        latent = self.linear(f"{prefix}kv_a_proj_with_mqa", x)
        up = self.linear(f"{prefix}kv_b_proj", self.norm(f"{prefix}kv_a_layernorm", latent[:, :rank]))
        key, value = up.view(count, heads, -1).tensor_split([nope], -1)
        query, shared = query.view(count, heads, -1), latent[:, None, rank:].expand(-1, heads, -1)
        angles, scale = self.angles(count, shared.shape[-1]), query.shape[-1] ** -0.5
        amplitude = 1.0
        if yarn:
            size, whole = (0.1 * yarn[name] * math.log(yarn["factor"]) + 1 for name in ("mscale", "mscale_all_dim"))
            amplitude, scale = size / whole, scale * whole**2
        query = torch.cat([query[..., :nope], turn(query[..., nope:], angles) * amplitude], -1)
        key = torch.cat([key, turn(shared, angles) * amplitude], -1)
        unseen = torch.ones(count, count, dtype=torch.bool).triu(1)
        return self.linear(f"{prefix}o_proj", attend(query, key, value, unseen, scale))


class MiMo(Prediction):
    rotated = 1.0

    def fused(self, token, state):
        return super().fused(state, token)


class Qwen(Prediction):
    """Norms around 1, gated heads, and a shared expert with its own gate."""

    around, rotated = 1.0, 0.25

    def feed_forward(self, prefix, x):
        if "num_experts" not in self.config:
            return super().feed_forward(prefix, x)
        weight, count, out = under(self.tensors, prefix, self.dtype), self.config["num_experts_per_tok"], []
        for row in x:
            scores = (weight["gate.weight"] @ row).softmax(0)
            best = sorted(range(len(scores)), key=lambda expert, of=scores: -float(of[expert]))[:count]
            total = (weight["shared_expert_gate.weight"] @ row).sigmoid() * gated(row, weight, "shared_expert.", GATED)
            for expert in best:
                total = total + scores[expert] / scores[best].sum() * gated(row, weight, f"experts.{expert}.", GATED)
            out.append(total)
        return torch.stack(out)


class Modules:
    """A chain of layers; each drafts a token after the whole true text, from the previous one's states."""

    def __init__(self, kind, checkpoint, target, layers, dtype):
        count = checkpoint.config["num_nextn_predict_layers"]
        self.modules = [kind(checkpoint, target, layers, dtype, module) for module in range(count)]

    def drafts(self, ids, hidden, steps):
        scores = []
        for module in self.modules[:steps]:
            hidden = module.states(ids, hidden.to(module.dtype))
            scores.append(module.scores(hidden[-1]))
            ids = [*ids[1:], int(scores[-1].argmax())]
        scores = torch.stack(scores)
        return scores, scores.softmax(-1).amax(-1)


class DeepseekV4(Stepwise):
    """Residual streams [n, S, H] joined by the formulas of the mHC paper, with the constants as published."""

    def __init__(self, checkpoint, target, layers, dtype):
        super().__init__(checkpoint, target, layers, dtype, "mtp.0.")
        self.streams = self.config["hc_mult"]

    def attention(self, x):
        config, dim = self.config, self.config["head_dim"]
        pairs = config["qk_rope_head_dim"] // 2
        angles = torch.outer(torch.arange(len(x)), config["rope_theta"] ** (-torch.arange(pairs).double() / pairs))
        angles = angles.to(self.dtype)
        query = self.linear("attn.wq_b", self.norm("attn.q_norm", self.linear("attn.wq_a", x)))
        query = turn(rms(query.view(len(x), -1, dim), config["rms_norm_eps"]), angles)
        latent = turn(self.norm("attn.kv_norm", self.linear("attn.wkv", x)), angles)
        out = attend_latents(query, latent, config["sliding_window"], self.tensors["attn.attn_sink"], dim)
        out = turn(out, -angles).view(len(x), config["o_groups"], -1)
        downs = self.tensors["attn.wo_a.weight"].chunk(config["o_groups"])
        return self.linear("attn.wo_b", torch.cat([out[:, g] @ down.T for g, down in enumerate(downs)], -1))

    def connected(self, streams, name, norm, block):
        """streams [n, S, H] through a block."""
        count, eps = self.streams, self.config["hc_eps"]
        mixes = rms(streams.flatten(1), self.config["rms_norm_eps"]) @ self.tensors[f"hc_{name}_fn"].T
        scale, base = self.tensors[f"hc_{name}_scale"], self.tensors[f"hc_{name}_base"]
        read = (mixes[:, :count] * scale[0] + base[:count]).sigmoid() + eps
        write = 2 * (mixes[:, count : 2 * count] * scale[1] + base[count : 2 * count]).sigmoid()
        carry = (mixes[:, 2 * count :] * scale[2] + base[2 * count :]).view(-1, count, count).softmax(2) + eps
        carry = carry / (carry.sum(1, keepdim=True) + eps)
        for _ in range(self.config["hc_sinkhorn_iters"] - 1):
            carry = carry / (carry.sum(2, keepdim=True) + eps)
            carry = carry / (carry.sum(1, keepdim=True) + eps)
        x = block(self.norm(norm, torch.einsum("ts,tsh->th", read, streams)))
        return write[..., None] * x[:, None] + torch.einsum("tsr,tsh->trh", carry, streams)

    def feed_forward(self, x):
        weight, limit = under(self.tensors, "ffn.", self.dtype), self.config["swiglu_limit"] or math.inf
        return mixture(x, self.config, weight, ("w1", "w3", "w2"), "gate.bias", limit=limit)

    def states(self, ids, hidden):
        embedded = self.linear("e_proj", self.norm("enorm", self.embedding[ids]))
        streams = self.norm("hnorm", hidden.view(len(ids), self.streams, -1))
        streams = self.linear("h_proj", streams) + embedded[:, None]
        streams = self.connected(streams, "attn", "attn_norm", self.attention)
        return self.connected(streams, "ffn", "ffn_norm", self.feed_forward).flatten(1)

    def scores(self, states):
        mixes = rms(states, self.config["rms_norm_eps"]) @ self.tensors["hc_head_fn"].T
        read = (mixes * self.tensors["hc_head_scale"] + self.tensors["hc_head_base"]).sigmoid() + self.config["hc_eps"]
        x = torch.einsum("ts,tsh->th", read, states.view(len(states), self.streams, -1))
        return self.norm("norm", x) @ self.head.T


class DFlash(Published):
    """A block of masks after a context whose keys and values are made from the target's states, layer by layer."""

    from_anchor = False
    """Whether the block's first token predicts, unless the config states it."""

    def __init__(self, checkpoint, target, layers, dtype):
        super().__init__(checkpoint, target, layers, dtype)
        self.fields = self.config["dflash_config"]

    def drafts(self, ids, target_hidden_states, steps):
        scores = self.whole(self.places(ids[-1], target_hidden_states, steps) @ self.head.T)
        return scores, scores.softmax(-1).amax(-1)

    def places(self, next_token, target_hidden_states, steps):
        """Return the normed states [K, H] that predict the tokens after next_token: each from the mask in its place, or
        from the position before it if the anchor predicts too."""
        first = 0 if (self.config | self.fields).get("sample_from_anchor", self.from_anchor) else 1
        block = [next_token, *[self.fields["mask_token_id"]] * (steps - 1 + first)]
        return self.states(target_hidden_states, block)[first:]

    def states(self, target_hidden_states, block):
        """Return normed states of a block's tokens after n verified tokens with target states [n, F]."""
        context = self.norm("hidden_norm", self.linear("fc", target_hidden_states.to(self.dtype)))
        x = self.embedding[block]
        for layer, (window, causal) in enumerate(self.layers):
            prefix = f"layers.{layer}."
            inputs = self.norm(f"{prefix}input_layernorm", x)
            every = torch.cat([context, self.convolved(f"{prefix}attention_conv.", 0, inputs, inputs)])
            out = self.attention(f"{prefix}self_attn.", every, window, causal, len(block))
            x = x + self.convolved(f"{prefix}attention_conv.", 1, inputs, out)
            normed = self.norm(f"{prefix}post_attention_layernorm", x)
            out = self.feed_forward(f"{prefix}mlp.", self.convolved(f"{prefix}mlp_conv.", 0, normed, normed))
            x = x + self.convolved(f"{prefix}mlp_conv.", 1, normed, out)
        return self.norm("norm", x)

    def convolved(self, prefix, side, inputs, x):
        """Return x [n, H] after the convolution before (side 0) or after (1) a sublayer with inputs [n, H]; x if there
        is none."""
        return x


class DSpark(DFlash):
    """With a Markov head: each place also depends on the token drafted before it."""

    from_anchor = True

    def drafts(self, ids, target_hidden_states, steps):
        scores, sure, previous = [], [], ids[-1]
        for state in self.places(previous, target_hidden_states, steps):
            known = padded(self.tensors["markov_head.markov_w1.weight"], self.vocab_size)[previous]
            scores.append(self.whole(self.head @ state + self.tensors["markov_head.markov_w2.weight"] @ known))
            inputs = torch.cat([state, known]) if self.config.get("confidence_head_with_markov") else state
            own = "confidence_head.proj.weight" in self.tensors
            sure.append(
                self.linear("confidence_head.proj", inputs).sigmoid()[0] if own else scores[-1].softmax(-1).max()
            )
            previous = int(scores[-1].argmax())
        return torch.stack(scores), torch.stack(sure)


class DFlash2(DFlash):
    """With a convolution before and after every sublayer, and a selector among each place's likeliest tokens."""

    def convolved(self, prefix, side, inputs, x):
        base = self.tensors[f"{prefix}base_kernel"][side]
        change = self.linear(f"{prefix}kernel_projection", inputs).view(len(x), 2, len(base), -1)[:, side]
        weights = base + change.repeat_interleave(self.fields["conv_group_size"], -1)
        out = torch.zeros_like(x)
        for place in range(len(x)):
            for tap in range(min(len(base), place + 1)):
                out[place] += weights[place, tap] * x[place - tap]
        return out

    def drafts(self, ids, target_hidden_states, steps):
        """Scores are -inf except for candidates."""
        scores, previous = torch.full((steps, self.vocab_size), -math.inf, dtype=self.dtype), ids[-1]
        before, after = (
            padded(self.tensors[f"candidate_selector.{part}_codebook"], self.vocab_size)
            for part in ("predecessor", "successor")
        )
        for place, state in enumerate(self.places(previous, target_hidden_states, steps)):
            unary = self.head @ state
            gate = self.tensors["candidate_selector.hidden_projection.weight"] @ state
            known = before[previous] * gate
            ranked = sorted(range(self.vocab_size), key=lambda token, of=unary: -float(of[token]))
            for token in ranked[: self.fields["selector_top_k"]]:
                scores[place, token] = unary[token] + known @ after[token]
            previous = int(scores[place].argmax())
        return scores, scores.softmax(-1).amax(-1)

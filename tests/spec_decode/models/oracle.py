"""The published models in plain torch: whole sequences, dense causal attention, tensors by their published names.

In fp64 for what is right, in fp32 for the error that rounding alone makes.

Legend: n positions, H hidden size.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from tests.spec_decode.models.generated import Generated, StubTarget


class Decoder:
    """Functions of the published tensors of one checkpoint."""

    def __init__(self, checkpoint: Generated, dtype: torch.dtype) -> None:
        self.config, self.dtype = checkpoint.config, dtype
        self.tensors = {name: tensor.to(dtype) for name, tensor in checkpoint.tensors.items()}

    def linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        out = x @ self.tensors[f"{name}.weight"].T
        return out + self.tensors[f"{name}.bias"] if f"{name}.bias" in self.tensors else out

    def norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        mean = (x**2).mean(-1, keepdim=True)
        return x / (mean + self.config["rms_norm_eps"]).sqrt() * self.tensors[f"{name}.weight"]

    def layer(self, prefix: str, inputs: torch.Tensor, residual: torch.Tensor, window: int | None) -> torch.Tensor:
        x = residual + self.attention(f"{prefix}self_attn.", inputs, window)
        normed = self.norm(f"{prefix}post_attention_layernorm", x)
        gate, up = (self.linear(f"{prefix}mlp.{part}_proj", normed) for part in ("gate", "up"))
        return x + self.linear(f"{prefix}mlp.down_proj", gate * gate.sigmoid() * up)

    def attention(self, prefix: str, inputs: torch.Tensor, window: int | None) -> torch.Tensor:
        n, heads = len(inputs), self.config["num_attention_heads"]
        kv_heads = self.config["num_key_value_heads"]
        query = self.linear(f"{prefix}q_proj", inputs).view(n, heads, -1)
        key = self.linear(f"{prefix}k_proj", inputs).view(n, kv_heads, -1)
        value = self.linear(f"{prefix}v_proj", inputs).view(n, kv_heads, -1)
        if f"{prefix}q_norm.weight" in self.tensors:
            query, key = self.norm(f"{prefix}q_norm", query), self.norm(f"{prefix}k_norm", key)
        query, key = self.rotated(query), self.rotated(key)
        out = torch.empty_like(query)
        for head in range(heads):
            shared = head // (heads // kv_heads)
            scores = query[:, head] @ key[:, shared].T * query.shape[-1] ** -0.5
            distance = torch.arange(n)[:, None] - torch.arange(n)[None]
            unseen = (distance < 0) | (distance >= (window or n))
            out[:, head] = scores.masked_fill(unseen, -math.inf).softmax(-1) @ value[:, shared]
        return self.linear(f"{prefix}o_proj", out.flatten(1))

    def rotated(self, x: torch.Tensor) -> torch.Tensor:
        """x [n, heads, D]: dims i and i + D / 2 are the parts of a complex number, turned by its position's angle."""
        real, imaginary = x.chunk(2, -1)
        frequencies = torch.tensor(self.frequencies(x.shape[-1]), dtype=torch.float64)
        angles = (torch.arange(len(x))[:, None] * frequencies[None]).to(x.dtype)
        turned = torch.complex(real, imaginary) * torch.polar(torch.ones_like(angles), angles)[:, None]
        return torch.cat([turned.real, turned.imag], -1)

    def frequencies(self, dim: int) -> list[float]:
        rope = self.config.get("rope_parameters") or self.config.get("rope_scaling") or {}
        theta = rope.get("rope_theta") or self.config["rope_theta"]
        plain = [theta ** (-2 * i / dim) for i in range(dim // 2)]
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind == "linear":
            return [frequency / rope["factor"] for frequency in plain]
        return [llama3(frequency, rope) for frequency in plain] if kind == "llama3" else plain


def llama3(frequency: float, rope: dict[str, Any]) -> float:
    length, factor = 2 * math.pi / frequency, rope["factor"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    original = rope["original_max_position_embeddings"]
    if length < original / high:
        return frequency
    if length > original / low:
        return frequency / factor
    smooth = (original / length - low) / (high - low)
    return (1 - smooth) * frequency / factor + smooth * frequency


class Eagle:
    def __init__(
        self, checkpoint: Generated, target: StubTarget, windows: list[int | None], dtype: torch.dtype
    ) -> None:
        self.decoder, self.windows = Decoder(checkpoint, dtype), windows
        own = self.decoder.tensors.get("embed_tokens.weight")
        self.embedding = target.embed.weight.to(dtype) if own is None else own
        self.head = target.lm_head.weight.to(dtype)

    def combine(self, target_hidden_states: torch.Tensor) -> torch.Tensor:
        return target_hidden_states

    def states(self, ids: list[int], hidden: torch.Tensor) -> torch.Tensor:
        x = self.decoder.linear("fc", torch.cat([self.embedding[ids], hidden], -1))
        for layer, window in enumerate(self.windows):
            prefix = f"layers.{layer}."
            inputs = self.decoder.norm(f"{prefix}input_layernorm", x) if layer else x
            x = self.decoder.layer(prefix, inputs, x, window)
        return x

    def scores(self, state: torch.Tensor) -> torch.Tensor:
        return self.head @ state


class Eagle3:
    def __init__(
        self, checkpoint: Generated, target: StubTarget, windows: list[int | None], dtype: torch.dtype
    ) -> None:
        self.decoder, self.windows = Decoder(checkpoint, dtype), windows
        tensors = self.decoder.tensors
        own = tensors.get("embed_tokens.weight")
        self.embedding = target.embed.weight.to(dtype) if own is None else own
        self.vocab_size = target.vocab_size
        self.d2t = checkpoint.tensors.get("d2t")
        self.first = "midlayer." if "midlayer.hidden_norm.weight" in tensors else "layers.0."
        self.feeds_normed = (checkpoint.config.get("eagle_config", {}) | checkpoint.config).get("norm_output")

    def combine(self, target_hidden_states: torch.Tensor) -> torch.Tensor:
        if "input_norm.weight" in self.decoder.tensors:
            target_hidden_states = self.decoder.norm("input_norm", target_hidden_states)
        if norms := [name for name in self.decoder.tensors if name.startswith("fc_norm.")]:
            each = target_hidden_states.split(target_hidden_states.shape[-1] // len(norms), -1)
            normed = [self.decoder.norm(f"fc_norm.{state}", part) for state, part in enumerate(each)]
            target_hidden_states = torch.cat(normed, -1)
        return self.decoder.linear("fc", target_hidden_states)

    def states(self, ids: list[int], hidden: torch.Tensor) -> torch.Tensor:
        decoder, first = self.decoder, self.first
        normed = decoder.norm(f"{first}hidden_norm", hidden)
        inputs = torch.cat([decoder.norm(f"{first}input_layernorm", self.embedding[ids]), normed], -1)
        residual = normed if decoder.config.get("norm_before_residual") else hidden
        x = decoder.layer(first, inputs, residual, self.windows[0])
        for layer, window in enumerate(self.windows[1:], 1):
            prefix = f"layers.{layer}."
            x = decoder.layer(prefix, decoder.norm(f"{prefix}input_layernorm", x), x, window)
        return decoder.norm("norm", x) if self.feeds_normed else x

    def scores(self, state: torch.Tensor) -> torch.Tensor:
        own = self.decoder.linear("lm_head", state if self.feeds_normed else self.decoder.norm("norm", state))
        if self.d2t is None:
            return own
        scores = torch.full((self.vocab_size,), -math.inf, dtype=self.decoder.dtype)
        for index, offset in enumerate(self.d2t.tolist()):
            scores[index + offset] = own[index]
        return scores


class LatentEagle3(Eagle3):
    """The same with DeepSeek's attention as `transformers` computes it, over a layer's input of twice the width."""

    def __init__(
        self, checkpoint: Generated, target: StubTarget, windows: list[int | None], dtype: torch.dtype
    ) -> None:
        from transformers import DeepseekV3Config
        from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek

        super().__init__(checkpoint, target, windows, dtype)
        tensors, prefix = self.decoder.tensors, f"{self.first}self_attn."
        self.config = DeepseekV3Config(**checkpoint.config, attn_implementation="eager")
        self.rotary = deepseek.DeepseekV3RotaryEmbedding(self.config)
        self.attention = deepseek.DeepseekV3Attention(self.config, 0)
        parts = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
        for name in ("q_proj", "q_a_proj", "kv_a_proj_with_mqa"):
            if f"{name}.weight" in parts:
                rows, columns = parts[f"{name}.weight"].shape
                setattr(self.attention, name, torch.nn.Linear(columns, rows, bias=False))
        self.attention.to(dtype).load_state_dict(parts)

    @torch.no_grad()
    def states(self, ids: list[int], hidden: torch.Tensor) -> torch.Tensor:
        decoder, first, n = self.decoder, self.first, len(ids)
        normed = decoder.norm(f"{first}hidden_norm", hidden)
        inputs = torch.cat([decoder.norm(f"{first}input_layernorm", self.embedding[ids]), normed], -1)
        unseen = torch.full((n, n), -math.inf, dtype=decoder.dtype).triu(1)
        angles = self.rotary(inputs[None], torch.arange(n)[None])
        attended = self.attention(inputs[None], angles, unseen[None, None])[0][0]
        x = (normed if decoder.config.get("norm_before_residual") else hidden) + attended
        normed = decoder.norm(f"{first}post_attention_layernorm", x)
        gate, up = (decoder.linear(f"{first}mlp.{part}_proj", normed) for part in ("gate", "up"))
        x = x + decoder.linear(f"{first}mlp.down_proj", gate * gate.sigmoid() * up)
        return decoder.norm("norm", x) if self.feeds_normed else x


class Causal:
    def __init__(
        self, checkpoint: Generated, target: StubTarget, windows: list[int | None], dtype: torch.dtype
    ) -> None:
        self.decoder, self.windows = Decoder(checkpoint, dtype), windows

    def combine(self, target_hidden_states: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(target_hidden_states), self.decoder.config["hidden_size"])

    def states(self, ids: list[int], hidden: torch.Tensor) -> torch.Tensor:
        x = self.decoder.tensors["model.embed_tokens.weight"][ids]
        for layer, window in enumerate(self.windows):
            prefix = f"model.layers.{layer}."
            x = self.decoder.layer(prefix, self.decoder.norm(f"{prefix}input_layernorm", x), x, window)
        return x

    def scores(self, state: torch.Tensor) -> torch.Tensor:
        head = "model.embed_tokens" if self.decoder.config.get("tie_word_embeddings") else "lm_head"
        return self.decoder.linear(head, self.decoder.norm("model.norm", state))


def greedy(
    model: Eagle | Eagle3 | Causal, ids: list[int], target_hidden_states: torch.Tensor, steps: int
) -> tuple[list[int], torch.Tensor]:
    """The next tokens after the input tokens, whose target states are [n, F], and the scores [steps, V] of each."""
    ids, hidden = list(ids), model.combine(target_hidden_states.to(model.decoder.dtype))
    scores = []
    for _ in range(steps):
        last = model.states(ids, hidden)[-1]
        scores.append(model.scores(last))
        ids.append(int(scores[-1].argmax()))
        hidden = torch.cat([hidden, last[None].to(hidden.dtype)])
    return ids[-steps:], torch.stack(scores)


def block(model: Eagle3 | Causal, ids: list[int], target_hidden_states: torch.Tensor, count: int) -> torch.Tensor:
    """Scores [count, V] after the last `count` of the input tokens, masks among them, with target states [n, F]."""
    states = model.states(ids, model.combine(target_hidden_states.to(model.decoder.dtype)))
    return torch.stack([model.scores(state) for state in states[-count:]])


class DFlash:
    """A block of masks after context whose keys and values are made of the target's states, layer by layer."""

    def __init__(
        self,
        checkpoint: Generated,
        target: StubTarget,
        layers: list[tuple[int | None, bool]],
        dtype: torch.dtype,
    ) -> None:
        """layers: of each its window, None for none, and whether it is causal."""
        self.decoder, self.layers = Decoder(checkpoint, dtype), layers
        tensors = self.decoder.tensors
        self.embedding = tensors.get("embed_tokens.weight", target.embed.weight.to(dtype))
        self.head = tensors.get("lm_head.weight", target.lm_head.weight.to(dtype))
        self.vocab_size, self.d2t = target.vocab_size, checkpoint.tensors.get("d2t")

    def states(self, target_hidden_states: torch.Tensor, block: list[int]) -> torch.Tensor:
        """Normed, of the tokens of a block after n verified tokens with target states [n, F]."""
        decoder = self.decoder
        context = decoder.norm("hidden_norm", decoder.linear("fc", target_hidden_states.to(decoder.dtype)))
        x = self.embedding[block]
        for layer, (window, causal) in enumerate(self.layers):
            prefix = f"layers.{layer}."
            inputs = decoder.norm(f"{prefix}input_layernorm", x)
            given = self.convolved(f"{prefix}attention_conv.", 0, inputs, inputs)
            out = self.attention(f"{prefix}self_attn.", torch.cat([context, given]), len(block), window, causal)
            x = x + self.convolved(f"{prefix}attention_conv.", 1, inputs, out)
            normed = decoder.norm(f"{prefix}post_attention_layernorm", x)
            given = self.convolved(f"{prefix}mlp_conv.", 0, normed, normed)
            gate, up = (decoder.linear(f"{prefix}mlp.{part}_proj", given) for part in ("gate", "up"))
            out = decoder.linear(f"{prefix}mlp.down_proj", gate * gate.sigmoid() * up)
            x = x + self.convolved(f"{prefix}mlp_conv.", 1, normed, out)
        return decoder.norm("norm", x)

    def convolved(self, prefix: str, side: int, inputs: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """x [n, H] through the convolution before (side 0) or after (1) a sublayer that takes inputs [n, H]; x itself
        where there is none."""
        return x

    def scores(
        self, target_hidden_states: torch.Tensor, next_token: int, mask: int, steps: int, first: int = 1
    ) -> torch.Tensor:
        """Of the places behind next_token, each by the mask in it; or with `first` 0 by what is before it."""
        block = [next_token, *[mask] * (steps - 1 + first)]
        return self.whole(self.states(target_hidden_states, block)[first:] @ self.head.T)

    def in_turn(
        self, target_hidden_states: torch.Tensor, next_token: int, mask: int, steps: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The same with a Markov head, each by the place before it and the token drafted there; and confidences."""
        tensors, config = self.decoder.tensors, self.decoder.config
        from_anchor = config.get("sample_from_anchor", True)
        block = [next_token, *[mask] * (steps - from_anchor)]
        states = self.states(target_hidden_states, block)[0 if from_anchor else 1 :]
        scores, confidences, previous = [], [], next_token
        for state in states:
            known = tensors["markov_head.markov_w1.weight"][previous]
            scores.append(self.whole((self.head @ state + tensors["markov_head.markov_w2.weight"] @ known)[None])[0])
            if "confidence_head.proj.weight" in tensors:
                inputs = torch.cat([state, known]) if config.get("confidence_head_with_markov") else state
                confidences.append(self.decoder.linear("confidence_head.proj", inputs).sigmoid()[0])
            previous = int(scores[-1].argmax())
        return torch.stack(scores), torch.stack(confidences) if confidences else torch.ones(steps)

    def whole(self, own: torch.Tensor) -> torch.Tensor:
        if self.d2t is None:
            return own
        scores = torch.full((len(own), self.vocab_size), -math.inf, dtype=self.decoder.dtype)
        scores[:, self.d2t + torch.arange(len(self.d2t))] = own
        return scores

    def attention(self, prefix: str, every: torch.Tensor, count: int, window: int | None, causal: bool) -> torch.Tensor:
        decoder, n = self.decoder, len(every)
        heads, kv_heads = decoder.config["num_attention_heads"], decoder.config["num_key_value_heads"]
        query, key, value = (
            decoder.linear(f"{prefix}{part}_proj", every).view(n, each, -1)
            for part, each in (("q", heads), ("k", kv_heads), ("v", kv_heads))
        )
        if f"{prefix}q_norm.weight" in decoder.tensors:
            query, key = decoder.norm(f"{prefix}q_norm", query), decoder.norm(f"{prefix}k_norm", key)
        query, key = decoder.rotated(query)[-count:], decoder.rotated(key)
        distance = torch.arange(n - count, n)[:, None] - torch.arange(n)[None]
        unseen = (distance < 0) if causal else distance < -n
        unseen = unseen | (distance >= (window or n))
        out = torch.empty_like(query)
        for head in range(heads):
            shared = head // (heads // kv_heads)
            scores = query[:, head] @ key[:, shared].T * query.shape[-1] ** -0.5
            out[:, head] = scores.masked_fill(unseen, -math.inf).softmax(-1) @ value[:, shared]
        return decoder.linear(f"{prefix}o_proj", out.flatten(1))


class DFlash2(DFlash):
    """DFlash with a convolution before and after every sublayer, and a selector among a place's likeliest tokens."""

    def convolved(self, prefix: str, side: int, inputs: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        base = self.decoder.tensors[f"{prefix}base_kernel"][side]
        taps, group = len(base), self.decoder.config["dflash_config"]["conv_group_size"]
        change = self.decoder.linear(f"{prefix}kernel_projection", inputs).view(len(x), 2, taps, -1)[:, side]
        weights = base + change.repeat_interleave(group, -1)
        out = torch.zeros_like(x)
        for place in range(len(x)):
            for tap in range(min(taps, place + 1)):
                out[place] += weights[place, tap] * x[place - tap]
        return out

    def in_turn(
        self, target_hidden_states: torch.Tensor, next_token: int, mask: int, steps: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Scores [steps, V] of each place, -inf for what is no candidate, each given the best of the place before; and
        how probable that best one is."""
        tensors, said = self.decoder.tensors, self.decoder.config["dflash_config"]
        first = 0 if said.get("sample_from_anchor") else 1
        states = self.states(target_hidden_states, [next_token, *[mask] * (steps - 1 + first)])[first:]
        scores, previous = torch.full((steps, self.vocab_size), -math.inf, dtype=self.decoder.dtype), next_token
        for place, state in enumerate(states):
            unary = self.head @ state
            gate = tensors["candidate_selector.hidden_projection.weight"] @ state
            known = tensors["candidate_selector.predecessor_codebook"][previous] * gate
            for token in sorted(range(self.vocab_size), key=lambda token: -float(unary[token]))[
                : said["selector_top_k"]
            ]:
                scores[place, token] = unary[token] + known @ tensors["candidate_selector.successor_codebook"][token]
            previous = int(scores[place].argmax())
        return scores, scores.softmax(-1).amax(-1)

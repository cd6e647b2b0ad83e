"""Tiny random checkpoints in the layouts of published drafts, and a target for them."""

from __future__ import annotations

import copy
import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from spec_decode.model_api import TargetModel

VOCAB, HIDDEN, TARGET_POSITIONS = 40, 32, 96
GATED = ("gate_proj", "up_proj", "down_proj")
FORMS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")


class StubTarget(TargetModel):
    """The parts of a target that drafts use: its embedding, its output projection and its sizes."""

    def __init__(
        self,
        *,
        vocab_size: int = VOCAB,
        hidden_size: int = HIDDEN,
        target_states_size: int | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(99)
        self.vocab_size, self.hidden_size, self.max_positions = vocab_size, hidden_size, TARGET_POSITIONS
        self.target_states_size = target_states_size or hidden_size
        self.embed = nn.Embedding(vocab_size, hidden_size, dtype=dtype)
        self.lm_head = nn.Linear(hidden_size, vocab_size, bias=False, dtype=dtype)
        for parameter in self.parameters():
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
        self.requires_grad_(False)

    def layer_groups(self, page_size):
        raise NotImplementedError

    def forward(self, token_ids, positions, attention):
        raise NotImplementedError

    def logits(self, hidden):
        return self.lm_head(hidden)


class ProductTarget(StubTarget):
    """One whose logits are a product."""

    @property
    def output_projection(self):
        return self.lm_head.weight


@dataclass
class Generated:
    """A checkpoint before it is written."""

    config: dict[str, Any]
    tensors: dict[str, torch.Tensor]

    def changed(
        self, config: dict[str, Any] | None = None, tensors: dict[str, Any] | None = None, without: Sequence[str] = ()
    ) -> Generated:
        """A copy with other fields of config.json, those of a section as "section.field", and other tensors; without
        the fields and tensors of these names."""
        fields = copy.deepcopy(self.config)
        for path, value in (config or {}).items():
            *sections, field = path.split(".")
            reduce(dict.__getitem__, sections, fields)[field] = value
        new = self.tensors | (tensors or {})
        return Generated(*({name: value for name, value in of.items() if name not in without} for of in (fields, new)))

    def write(self, folder: Path, form: str = "model.safetensors") -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        if not form.endswith(".index.json"):
            save(folder / form, self.tensors)
            return folder
        stem, kind = form.removesuffix(".index.json").rsplit(".", 1)
        places = {}
        for part in range(2):
            shard = f"{stem}-{part + 1:05}-of-00002.{kind}"
            part_tensors = {name: tensor for i, (name, tensor) in enumerate(self.tensors.items()) if i % 2 == part}
            save(folder / shard, part_tensors)
            places |= dict.fromkeys(part_tensors, shard)
        (folder / form).write_text(json.dumps({"metadata": {"total_size": 0}, "weight_map": places}))
        return folder


def save(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    if path.suffix == ".bin":
        torch.save(tensors, path)
    else:
        save_file(tensors, path)


def duplicate_name(path: Path) -> str:
    """Duplicate a name in the header of a safetensors file; return the name."""
    raw = path.read_bytes()
    end = 8 + struct.unpack("<Q", raw[:8])[0]
    name, entry = next(item for item in json.loads(raw[8:end]).items() if item[0] != "__metadata__")
    header = raw[8:end].rstrip().removesuffix(b"}") + f", {json.dumps(name)}: {json.dumps(entry)}}}".encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + raw[end:])
    return name


class Tensors:
    """Random tensors by name, with norms and biases that do something. around: what the weights of norms are around."""

    def __init__(self, seed: int, prefix: str = "", around: float = 1.0) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.prefix, self.around = prefix, around
        self.drawn: dict[str, torch.Tensor] = {}

    def draw(self, name: str, *shape: int, scale: float = 1.0, around: float = 0.0) -> None:
        self.drawn[self.prefix + name] = around + torch.randn(shape, generator=self.generator) * scale

    def matrix(self, name: str, rows: int, columns: int, gain: float = 1.5) -> None:
        self.draw(f"{name}.weight", rows, columns, scale=gain * columns**-0.5)

    def table(self, name: str, rows: int, columns: int) -> None:
        self.draw(f"{name}.weight", rows, columns)

    def norms(self, size: int, *names: str) -> None:
        for name in names:
            self.draw(f"{name}.weight", size, scale=1 / 3, around=self.around)

    def bias(self, name: str, size: int) -> None:
        self.draw(f"{name}.bias", size, scale=1 / 3)

    def gated(self, prefix: str, inner: int, hidden: int, names: Sequence[str] = GATED) -> None:
        gate, up, down = (f"{prefix}{name}" for name in names)
        self.matrix(gate, inner, hidden)
        self.matrix(up, inner, hidden)
        self.matrix(down, hidden, inner)

    def experts(self, prefix: str, count: int, inner: int, hidden: int, names: Sequence[str] = GATED) -> None:
        self.matrix(f"{prefix}gate", count, hidden)
        for expert in range(count):
            self.gated(f"{prefix}experts.{expert}.", inner, hidden, names)

    def grouped_heads(
        self,
        prefix: str,
        config: dict[str, Any],
        inputs: int,
        *,
        qkv_bias: bool = False,
        out_bias: bool = False,
        qk_norm: bool = False,
        gate: bool = False,
    ) -> None:
        hidden, heads, kv_heads = (config[n] for n in ("hidden_size", "num_attention_heads", "num_key_value_heads"))
        dim = config.get("head_dim") or hidden // heads
        for part, count in zip("qkv", (heads * (1 + gate), kv_heads, kv_heads), strict=True):
            self.matrix(f"{prefix}{part}_proj", count * dim, inputs)
            if qkv_bias:
                self.bias(f"{prefix}{part}_proj", count * dim)
        self.matrix(f"{prefix}o_proj", hidden, heads * dim)
        if out_bias:
            self.bias(f"{prefix}o_proj", hidden)
        if qk_norm:
            self.norms(dim, f"{prefix}q_norm", f"{prefix}k_norm")

    def latent_heads(self, prefix: str, config: dict[str, Any], inputs: int) -> None:
        """Add DeepSeek's attention over a latent."""
        heads, rank, nope, rope, values = (
            config[name]
            for name in ("num_attention_heads", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        )
        if (q_rank := config["q_lora_rank"]) is None:
            self.matrix(f"{prefix}q_proj", heads * (nope + rope), inputs)
        else:
            self.matrix(f"{prefix}q_a_proj", q_rank, inputs)
            self.norms(q_rank, f"{prefix}q_a_layernorm")
            self.matrix(f"{prefix}q_b_proj", heads * (nope + rope), q_rank)
        self.matrix(f"{prefix}kv_a_proj_with_mqa", rank + rope, inputs)
        self.norms(rank, f"{prefix}kv_a_layernorm")
        self.matrix(f"{prefix}kv_b_proj", heads * (nope + values), rank)
        self.matrix(f"{prefix}o_proj", config["hidden_size"], heads * values)

    def feed_forward(self, prefix: str, config: dict[str, Any]) -> None:
        """Add a dense layer, a mixture in DeepSeek's and GLM's layout, or one in Qwen's."""
        hidden, inner = config["hidden_size"], config.get("moe_intermediate_size", 0)
        if (count := config.get("n_routed_experts")) is not None:
            self.experts(prefix, count, inner, hidden)
            self.draw(f"{prefix}gate.e_score_correction_bias", count, scale=0.5)
            self.gated(f"{prefix}shared_experts.", inner * config["n_shared_experts"], hidden)
        elif "num_experts" in config:
            self.experts(prefix, config["num_experts"], inner, hidden)
            self.gated(f"{prefix}shared_expert.", config["shared_expert_intermediate_size"], hidden)
            self.matrix(f"{prefix}shared_expert_gate", 1, hidden)
        else:
            self.gated(prefix, config["intermediate_size"], hidden)

    def layer(
        self,
        prefix: str,
        config: dict[str, Any],
        *,
        inputs: int | None = None,
        input_norm: bool = True,
        **heads: bool,
    ) -> None:
        hidden, attention = config["hidden_size"], f"{prefix}self_attn."
        if config.get("kv_lora_rank"):
            self.latent_heads(attention, config, inputs or hidden)
        else:
            self.grouped_heads(attention, config, inputs or hidden, **heads)
        self.feed_forward(f"{prefix}mlp.", config)
        self.norms(hidden, f"{prefix}post_attention_layernorm", *[f"{prefix}input_layernorm"] * input_norm)

    def vocabulary(self, config: dict[str, Any], draft_vocab: int | None, *, embedding: bool, head: bool) -> None:
        """Add the draft's own embedding and head; a draft vocabulary always has a head."""
        if embedding:
            self.table("embed_tokens", config["vocab_size"], config["hidden_size"])
        if head or draft_vocab is not None:
            self.matrix("lm_head", draft_vocab or config["vocab_size"], config["hidden_size"])
        if draft_vocab is not None:
            config["draft_vocab_size"] = draft_vocab
            self.drawn |= make_maps(draft_vocab, config["vocab_size"])


def decoder_config(**changes: Any) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_act": "silu",
        "max_position_embeddings": 80,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500.0,
        **changes,
    }


def make_eagle(
    *, fc_bias: bool = False, own_embedding: bool = False, qkv_bias: bool = False, seed: int = 0, **changes: Any
) -> Generated:
    config = decoder_config(**changes)
    hidden, tensors = config["hidden_size"], Tensors(seed)
    # No norm bounds the recurrent states: a larger gain would amplify rounding from step to step.
    tensors.matrix("fc", hidden, 2 * hidden, gain=0.5)
    if fc_bias:
        tensors.bias("fc", hidden)
    for layer in range(config["num_hidden_layers"]):
        tensors.layer(f"layers.{layer}.", config, input_norm=layer > 0, qkv_bias=qkv_bias)
    tensors.vocabulary(config, None, embedding=own_embedding, head=False)
    return Generated(config, tensors.drawn)


def make_eagle3(
    *,
    draft_vocab: int | None = 24,
    own_embedding: bool = False,
    first: str = "midlayer.",
    target_hidden: int = HIDDEN,
    num_states: int = 3,
    qkv_bias: bool = False,
    mask: tuple[int, ...] | None = None,
    own_head: bool = True,
    seed: int = 0,
    **changes: Any,
) -> Generated:
    """draft_vocab None: the target's, without a map. mask: dims of 1 before those of P-EAGLE's mask_hidden.
    num_states: of the target's layers."""
    config = decoder_config(**changes)
    hidden, tensors = config["hidden_size"], Tensors(seed)
    flags = config.get("eagle_config", {}) | config
    tensors.matrix("fc", hidden, num_states * target_hidden)
    if flags.get("norm_before_fc"):
        tensors.norms(num_states * target_hidden, "input_norm")
    if flags.get("fc_norm"):
        tensors.norms(target_hidden, *(f"fc_norm.{state}" for state in range(num_states)))
    tensors.layer(first, config, inputs=2 * hidden, qkv_bias=qkv_bias)
    tensors.norms(hidden, f"{first}hidden_norm", "norm")
    for layer in range(1, config["num_hidden_layers"]):
        tensors.layer(f"layers.{layer}.", config, qkv_bias=qkv_bias)
    if mask is not None:
        tensors.draw("mask_hidden", *mask, num_states * target_hidden)
    tensors.vocabulary(config, draft_vocab, embedding=own_embedding, head=True)
    if not own_head:
        del tensors.drawn["lm_head.weight"]
    return Generated(config, tensors.drawn)


def make_latent_eagle3(*, target_hidden: int = HIDDEN, **changes: Any) -> Generated:
    """EAGLE-3 with DeepSeek's attention over a latent."""
    fields = {
        "architectures": ["Eagle3DeepseekV2ForCausalLM"], "model_type": "deepseek_v3", "num_attention_heads": 3,
        "num_key_value_heads": 3, "rms_norm_eps": 1e-6, "target_hidden_size": target_hidden, "q_lora_rank": 20,
        "kv_lora_rank": 32, "qk_nope_head_dim": 12, "qk_rope_head_dim": 16, "v_head_dim": 10,
    }  # fmt: skip
    return make_eagle3(target_hidden=target_hidden, **{**fields, **changes})


def make_dflash(
    *,
    num_states: int = 2,
    target_hidden: int = HIDDEN,
    draft_vocab: int | None = None,
    own_embedding: bool = False,
    own_head: bool = False,
    qk_norm: bool = True,
    seed: int = 0,
    dflash_config: dict[str, Any] | None = None,
    markov_rank: int | None = None,
    **changes: Any,
) -> Generated:
    """draft_vocab None: the target's, without a map. num_states: of the target's layers. markov_rank: of DSpark."""
    fields = {"mask_token_id": 3, "target_layer_ids": list(range(num_states)), **(dflash_config or {})}
    config = decoder_config(**{"num_hidden_layers": 2, "dflash_config": fields, **changes})
    hidden, tensors = config["hidden_size"], Tensors(seed)
    tensors.matrix("fc", hidden, num_states * target_hidden)
    for layer in range(config["num_hidden_layers"]):
        tensors.layer(f"layers.{layer}.", config, qk_norm=qk_norm, qkv_bias=not qk_norm)
    tensors.norms(hidden, "hidden_norm", "norm")
    if markov_rank is not None:
        config["markov_rank"] = markov_rank
        tensors.table("markov_head.markov_w1", config["vocab_size"], markov_rank)
        tensors.matrix("markov_head.markov_w2", draft_vocab or config["vocab_size"], markov_rank, gain=4)
        if config.get("enable_confidence_head"):
            more = markov_rank if config.get("confidence_head_with_markov") else 0
            tensors.matrix("confidence_head.proj", 1, hidden + more, gain=3)
            tensors.bias("confidence_head.proj", 1)
    tensors.vocabulary(config, draft_vocab, embedding=own_embedding, head=own_head)
    return Generated(config, tensors.drawn)


def make_dflash2(
    *,
    taps: int = 2,
    group: int = 8,
    rank: int = 6,
    candidates: int = 5,
    block: int = 8,
    sizes: dict[str, Any] | None = None,
    seed: int = 0,
    **changes: Any,
) -> Generated:
    """A DFlash with convolutions and a selector. sizes: what dflash_config says otherwise of them."""
    fields = {
        "block_size": block, "conv_kernel_size": taps, "conv_group_size": group, "selector_rank": rank,
        "selector_top_k": candidates, **(sizes or {}),
    }  # fmt: skip
    plain = make_dflash(seed=seed, architectures=["DFlash2DraftModel"], **changes)
    config = {**plain.config, "dflash_config": {**plain.config["dflash_config"], **fields}}
    hidden, vocab, tensors = config["hidden_size"], config["vocab_size"], Tensors(seed + 1)
    for layer in range(config["num_hidden_layers"]):
        for part in ("attention_conv", "mlp_conv"):
            prefix = f"layers.{layer}.{part}."
            tensors.draw(f"{prefix}base_kernel", 2, taps, hidden, scale=0.5)
            tensors.drawn[f"{prefix}base_kernel"][:, 0] += 1
            tensors.matrix(f"{prefix}kernel_projection", 2 * taps * (hidden // group), hidden, gain=0.5)
    for part in ("predecessor", "successor"):
        tensors.draw(f"candidate_selector.{part}_codebook", vocab, rank)
    tensors.matrix("candidate_selector.hidden_projection", rank, hidden, gain=3)
    return Generated(config, plain.tensors | tensors.drawn)


def make_maps(draft_vocab: int, target_vocab: int) -> dict[str, torch.Tensor]:
    ids = torch.randperm(target_vocab, generator=torch.Generator().manual_seed(3))[:draft_vocab].sort().values
    reached = torch.zeros(target_vocab, dtype=torch.bool)
    reached[ids] = True
    return {"d2t": ids - torch.arange(draft_vocab), "t2d": reached}


def make_causal(architecture: str = "LlamaForCausalLM", *, seed: int = 0, **changes: Any) -> Generated:
    config = decoder_config(**{"architectures": [architecture], "num_hidden_layers": 2, **changes})
    hidden, vocab, tensors = config["hidden_size"], config["vocab_size"], Tensors(seed)
    tensors.table("model.embed_tokens", vocab, hidden)
    biased = config.get("attention_bias", False)
    for layer in range(config["num_hidden_layers"]):
        tensors.layer(
            f"model.layers.{layer}.",
            config,
            qkv_bias=biased or architecture == "Qwen2ForCausalLM",
            out_bias=biased,
            qk_norm=architecture == "Qwen3ForCausalLM",
        )
    tensors.norms(hidden, "model.norm")
    if not config.get("tie_word_embeddings"):
        tensors.matrix("lm_head", vocab, hidden)
    return Generated(config, tensors.drawn)

"""Tiny random checkpoints in the layouts in which drafts are published, and a target for them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from spec_decode.models import TargetModel

VOCAB, HIDDEN, TARGET_POSITIONS = 40, 32, 96
FORMS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")


class StubTarget(TargetModel):
    """What drafts use of a target: its embedding, its output projection and its sizes."""

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


@dataclass
class Generated:
    """A checkpoint before it is written."""

    config: dict[str, Any]
    tensors: dict[str, torch.Tensor]

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
            held = {name: tensor for i, (name, tensor) in enumerate(self.tensors.items()) if i % 2 == part}
            save(folder / shard, held)
            places |= dict.fromkeys(held, shard)
        (folder / form).write_text(json.dumps({"metadata": {"total_size": 0}, "weight_map": places}))
        return folder


def save(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    if path.suffix == ".bin":
        torch.save(tensors, path)
    else:
        save_file(tensors, path)


class Tensors:
    """Random tensors by name, with norms and biases that do something."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.made: dict[str, torch.Tensor] = {}

    def matrix(self, name: str, rows: int, columns: int, gain: float = 1.5) -> None:
        self.made[f"{name}.weight"] = torch.randn(rows, columns, generator=self.generator) * gain * columns**-0.5

    def table(self, name: str, rows: int, columns: int) -> None:
        self.made[f"{name}.weight"] = torch.randn(rows, columns, generator=self.generator)

    def norm(self, name: str, size: int) -> None:
        self.made[f"{name}.weight"] = 1 + torch.randn(size, generator=self.generator) / 3

    def bias(self, name: str, size: int) -> None:
        self.made[f"{name}.bias"] = torch.randn(size, generator=self.generator) / 3

    def layer(
        self,
        prefix: str,
        config: dict[str, Any],
        *,
        inputs: int | None = None,
        input_norm: bool = True,
        qkv_bias: bool = False,
        out_bias: bool = False,
        qk_norm: bool = False,
    ) -> None:
        hidden, wide = config["hidden_size"], config["intermediate_size"]
        heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        dim = config.get("head_dim") or hidden // heads
        for part, count in zip("qkv", (heads, kv_heads, kv_heads), strict=True):
            self.matrix(f"{prefix}self_attn.{part}_proj", count * dim, inputs or hidden)
            if qkv_bias:
                self.bias(f"{prefix}self_attn.{part}_proj", count * dim)
        self.matrix(f"{prefix}self_attn.o_proj", hidden, heads * dim)
        if out_bias:
            self.bias(f"{prefix}self_attn.o_proj", hidden)
        if qk_norm:
            self.norm(f"{prefix}self_attn.q_norm", dim)
            self.norm(f"{prefix}self_attn.k_norm", dim)
        for part, shape in {"gate": (wide, hidden), "up": (wide, hidden), "down": (hidden, wide)}.items():
            self.matrix(f"{prefix}mlp.{part}_proj", *shape)
        self.norm(f"{prefix}post_attention_layernorm", hidden)
        if input_norm:
            self.norm(f"{prefix}input_layernorm", hidden)


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
    # No norm bounds the states that go round: a larger gain would amplify rounding from step to step.
    tensors.matrix("fc", hidden, 2 * hidden, gain=0.5)
    if fc_bias:
        tensors.bias("fc", hidden)
    if own_embedding:
        tensors.table("embed_tokens", config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        tensors.layer(f"layers.{layer}.", config, input_norm=layer > 0, qkv_bias=qkv_bias)
    return Generated(config, tensors.made)


def make_eagle3(
    *,
    draft_vocab: int | None = 24,
    own_embedding: bool = False,
    first: str = "midlayer.",
    target_hidden: int = HIDDEN,
    num_states: int = 3,
    qkv_bias: bool = False,
    mask: tuple[int, ...] | None = None,
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
        tensors.norm("input_norm", num_states * target_hidden)
    for state in range(num_states if flags.get("fc_norm") else 0):
        tensors.norm(f"fc_norm.{state}", target_hidden)
    tensors.layer(first, config, inputs=2 * hidden, qkv_bias=qkv_bias)
    tensors.norm(f"{first}hidden_norm", hidden)
    for layer in range(1, config["num_hidden_layers"]):
        tensors.layer(f"layers.{layer}.", config, qkv_bias=qkv_bias)
    if mask is not None:
        tensors.made["mask_hidden"] = torch.randn(*mask, num_states * target_hidden, generator=tensors.generator)
    tensors.norm("norm", hidden)
    tensors.matrix("lm_head", draft_vocab or config["vocab_size"], hidden)
    if own_embedding:
        tensors.table("embed_tokens", config["vocab_size"], hidden)
    if draft_vocab is not None:
        config["draft_vocab_size"] = draft_vocab
        tensors.made |= make_maps(draft_vocab, config["vocab_size"])
    return Generated(config, tensors.made)


def make_latent_eagle3(
    *,
    draft_vocab: int | None = 24,
    own_embedding: bool = False,
    first: str = "midlayer.",
    target_hidden: int = HIDDEN,
    num_states: int = 3,
    seed: int = 0,
    **changes: Any,
) -> Generated:
    """EAGLE-3 with DeepSeek's attention over a latent. draft_vocab None: the target's, without a map."""
    ranks = {"q_lora_rank": 20, "kv_lora_rank": 32, "qk_nope_head_dim": 12, "qk_rope_head_dim": 16, "v_head_dim": 10}
    config = decoder_config(
        **{
            "architectures": ["Eagle3DeepseekV2ForCausalLM"],
            "model_type": "deepseek_v3",
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "rms_norm_eps": 1e-6,
            "target_hidden_size": target_hidden,
            **ranks,
            **changes,
        }
    )
    hidden, heads, tensors = config["hidden_size"], config["num_attention_heads"], Tensors(seed)
    query = config["qk_nope_head_dim"] + config["qk_rope_head_dim"]
    tensors.matrix("fc", hidden, num_states * target_hidden)
    for state in range(num_states if config.get("fc_norm") else 0):
        tensors.norm(f"fc_norm.{state}", target_hidden)
    for norm in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
        tensors.norm(f"{first}{norm}", hidden)
    attention, rank = f"{first}self_attn.", config["kv_lora_rank"]
    if (q_rank := config["q_lora_rank"]) is None:
        tensors.matrix(f"{attention}q_proj", heads * query, 2 * hidden)
    else:
        tensors.matrix(f"{attention}q_a_proj", q_rank, 2 * hidden)
        tensors.norm(f"{attention}q_a_layernorm", q_rank)
        tensors.matrix(f"{attention}q_b_proj", heads * query, q_rank)
    tensors.matrix(f"{attention}kv_a_proj_with_mqa", rank + config["qk_rope_head_dim"], 2 * hidden)
    tensors.norm(f"{attention}kv_a_layernorm", rank)
    tensors.matrix(f"{attention}kv_b_proj", heads * (config["qk_nope_head_dim"] + config["v_head_dim"]), rank)
    tensors.matrix(f"{attention}o_proj", hidden, heads * config["v_head_dim"])
    wide = config["intermediate_size"]
    for part, shape in {"gate": (wide, hidden), "up": (wide, hidden), "down": (hidden, wide)}.items():
        tensors.matrix(f"{first}mlp.{part}_proj", *shape)
    tensors.norm("norm", hidden)
    tensors.matrix("lm_head", draft_vocab or config["vocab_size"], hidden)
    if own_embedding:
        tensors.table("embed_tokens", config["vocab_size"], hidden)
    if draft_vocab is not None:
        config["draft_vocab_size"] = draft_vocab
        tensors.made |= make_maps(draft_vocab, config["vocab_size"])
    return Generated(config, tensors.made)


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
    said = {"mask_token_id": 3, "target_layer_ids": list(range(num_states)), **(dflash_config or {})}
    config = decoder_config(**{"num_hidden_layers": 2, "dflash_config": said, **changes})
    hidden, tensors = config["hidden_size"], Tensors(seed)
    tensors.matrix("fc", hidden, num_states * target_hidden)
    tensors.norm("hidden_norm", hidden)
    for layer in range(config["num_hidden_layers"]):
        tensors.layer(f"layers.{layer}.", config, qk_norm=qk_norm, qkv_bias=not qk_norm)
    tensors.norm("norm", hidden)
    if own_embedding:
        tensors.table("embed_tokens", config["vocab_size"], hidden)
    if markov_rank is not None:
        config["markov_rank"] = markov_rank
        tensors.table("markov_head.markov_w1", config["vocab_size"], markov_rank)
        tensors.matrix("markov_head.markov_w2", draft_vocab or config["vocab_size"], markov_rank, gain=4)
        if config.get("enable_confidence_head"):
            more = markov_rank if config.get("confidence_head_with_markov") else 0
            tensors.matrix("confidence_head.proj", 1, hidden + more, gain=3)
            tensors.bias("confidence_head.proj", 1)
    if own_head or draft_vocab is not None:
        tensors.matrix("lm_head", draft_vocab or config["vocab_size"], hidden)
    if draft_vocab is not None:
        config["draft_vocab_size"] = draft_vocab
        tensors.made |= make_maps(draft_vocab, config["vocab_size"])
    return Generated(config, tensors.made)


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
    said = {
        "block_size": block, "conv_kernel_size": taps, "conv_group_size": group, "selector_rank": rank,
        "selector_top_k": candidates, **(sizes or {}),
    }  # fmt: skip
    plain = make_dflash(seed=seed, architectures=["DFlash2DraftModel"], **changes)
    config = {**plain.config, "dflash_config": {**plain.config["dflash_config"], **said}}
    hidden, vocab, tensors = config["hidden_size"], config["vocab_size"], Tensors(seed + 1)
    for layer in range(config["num_hidden_layers"]):
        for part in ("attention_conv", "mlp_conv"):
            prefix = f"layers.{layer}.{part}."
            base = torch.randn(2, taps, hidden, generator=tensors.generator) / 2
            base[:, 0] += 1
            tensors.made[f"{prefix}base_kernel"] = base
            tensors.matrix(f"{prefix}kernel_projection", 2 * taps * (hidden // group), hidden, gain=0.5)
    for part in ("predecessor", "successor"):
        tensors.made[f"candidate_selector.{part}_codebook"] = torch.randn(vocab, rank, generator=tensors.generator)
    tensors.matrix("candidate_selector.hidden_projection", rank, hidden, gain=3)
    return Generated(config, plain.tensors | tensors.made)


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
    tensors.norm("model.norm", hidden)
    if not config.get("tie_word_embeddings"):
        tensors.matrix("lm_head", vocab, hidden)
    return Generated(config, tensors.made)

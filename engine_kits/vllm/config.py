"""The configuration that vLLM's builders read: a small model with an EAGLE draft, in the sizes of a spec."""

from __future__ import annotations

import copy
import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from builders import AttentionSpec

LAYER = "model.layers.0.attn"
MAX_ROWS, MAX_TOKENS, MAX_LENGTH = 16, 2048, 2048
_LLAMA = {
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 4096,
    "max_position_embeddings": MAX_LENGTH,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_MODELS = {"LlamaForCausalLM": 2, "EagleLlamaForCausalLM": 1}
"""Architectures of the target and the draft, with their layer counts."""


class NoModel(torch.nn.Module):
    """The methods that vLLM requires of a class to count as a model that generates text."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None: ...

    def embed_input_ids(self, input_ids: Any) -> Any: ...

    def forward(self, input_ids: Any, positions: Any) -> Any: ...

    def compute_logits(self, hidden_states: Any) -> Any: ...


@cache
def config_of(spec: AttentionSpec, tokens: int = 4) -> Any:
    """Return a VllmConfig with these heads, this window and `tokens` draft tokens."""
    made = copy.deepcopy(_plain(tokens))
    heads = {
        "num_attention_heads": spec.num_q_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "sliding_window": spec.sliding_window,
    }
    model = made.model_config
    for config in {id(each): each for each in (model.hf_config, model.hf_text_config)}.values():
        config.update(heads)
    model.model_arch_config = model.get_model_arch_config()
    return made


@cache
def _plain(tokens: int) -> Any:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.models.registry import ModelRegistry

    with TemporaryDirectory() as folder:
        homes = []
        for architecture, layers in _MODELS.items():
            # vLLM would inspect its own class in a separate process, which takes half a minute.
            ModelRegistry.register_model(architecture, NoModel)
            homes.append(home := Path(folder) / architecture)
            home.mkdir()
            document = {"architectures": [architecture], "num_hidden_layers": layers, **_LLAMA}
            (home / "config.json").write_text(json.dumps(document), encoding="utf-8")
        return EngineArgs(
            model=str(homes[0]),
            load_format="dummy",
            skip_tokenizer_init=True,
            max_model_len=MAX_LENGTH,
            dtype="bfloat16",
            max_num_seqs=MAX_ROWS,
            max_num_batched_tokens=MAX_TOKENS,
            gpu_memory_utilization=0.5,
            speculative_config={"method": "eagle", "model": str(homes[1]), "num_speculative_tokens": tokens},
        ).create_engine_config()

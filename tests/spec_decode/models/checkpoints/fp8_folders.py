"""Folders of tiny models in the published layouts of FP8 weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.spec_decode.models.test_decoder_target import make_model

FP8 = torch.float8_e4m3fn
BLOCK = (16, 24)
"""Which leaves a part of a block in some weights."""
Tensors = dict[str, torch.Tensor]


def compressed(strategy: str, **changes: Any) -> dict[str, Any]:
    """As llm-compressor writes it."""
    weights = {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True, "dynamic": False}
    weights |= {"group_size": None, "block_structure": [*BLOCK] if strategy == "block" else None, "actorder": None}
    rows = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": rows}},
        "ignore": ["lm_head", "re:.*mlp.gate$"],
        "kv_cache_scheme": None,
        "sparsity_config": {},
        **changes,
    }


def per_tensor(weight: torch.Tensor) -> torch.Tensor:
    return weight.abs().amax()[None] / 448


def per_channel(weight: torch.Tensor) -> torch.Tensor:
    # Powers of two that differ, so that no scale follows from the values.
    return weight.abs().amax(1, True) / 448 * 2.0 ** (torch.arange(len(weight)) % 3)[:, None]


def per_block(weight: torch.Tensor) -> torch.Tensor:
    padded = torch.nn.functional.pad(weight, (0, -weight.shape[1] % BLOCK[1], 0, -weight.shape[0] % BLOCK[0]))
    return padded.unflatten(1, (-1, BLOCK[1])).unflatten(0, (-1, BLOCK[0])).abs().amax((1, 3)) / 448


LAYOUTS: dict[str, tuple[dict[str, Any], Callable[[torch.Tensor], torch.Tensor], str]] = {
    "channel": (compressed("channel"), per_channel, "weight_scale"),
    "tensor": (compressed("tensor"), per_tensor, "weight_scale"),
    "blocks of compressed-tensors": (compressed("block"), per_block, "weight_scale"),
    "blocks": (
        {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [*BLOCK]},
        per_block,
        "weight_scale_inv",
    ),
    "one tensor": (
        {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head", "mlp.gate"]},
        lambda weight: per_tensor(weight)[0],
        "weight_scale",
    ),
}


def is_quantised(name: str) -> bool:
    return name.endswith("_proj.weight")


def expanded(scale: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """A scale for each number of the weight."""
    if scale.numel() == 1 or len(scale) == len(weight):
        return scale.expand_as(weight)
    whole = scale.repeat_interleave(BLOCK[0], 0).repeat_interleave(BLOCK[1], 1)
    return whole[: weight.shape[0], : weight.shape[1]]


def write_fp8(folder: Path, kind: str, layout: str, change: Callable[[Tensors], None] = lambda _: None) -> Path:
    """Write the model of a kind in FP8, and return a folder in it with the same numbers in fp32."""
    config, scale_of, suffix = LAYOUTS[layout]
    wide = folder / "wide"
    make_model(kind).save_pretrained(wide)
    tensors = load_file(wide / "model.safetensors")
    for name, weight in list(tensors.items()):
        if not is_quantised(name):
            continue
        scale = scale_of(weight).float()
        per_number = expanded(scale, weight)
        values = (weight / per_number).clamp(-448, 448).to(FP8)
        tensors[name], tensors[name.removesuffix("weight") + suffix] = values, scale.clone()
        if config.get("activation_scheme") == "static":
            tensors[name.removesuffix("weight") + "input_scale"] = torch.tensor(0.25)
    numbers = {name: part for name, part in tensors.items() if not name.endswith("scale") and "scale_inv" not in name}
    fields = json.loads((wide / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**fields, "quantization_config": config}))
    for name in numbers:
        if is_quantised(name):
            scale = tensors[name.removesuffix("weight") + suffix]
            numbers[name] = tensors[name].float() * expanded(scale, tensors[name])
    save_file(numbers, wide / "model.safetensors", {"format": "pt"})
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return wide

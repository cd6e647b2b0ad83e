"""Models in the published layout with random weights: written to a folder, and loaded as `LLM` loads them."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from spec_decode.matrix.sources import Load
from spec_decode.models.causal_lm import load_target
from spec_decode.models.checkpoints.files import CheckpointError
from spec_decode.models.checkpoints.store import TensorStore
from spec_decode.models.decoder import DecoderTarget
from spec_decode.models.target_fields import unserved

_SPARE = 1 << 20
"""Numbers beyond those of the largest matrix: the matrices begin within them."""
_STRIDE = 104_729
"""A prime, so that no two matrices of a model begin at the same number."""
_STATUS, _CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_RESET_PEAK = "5"

Shapes = Mapping[str, tuple[int, ...]]


def save_random(folder: Path, shapes: Shapes) -> None:
    """Save matrices of normal numbers, whose products have a standard deviation of 1 or less, and vectors of ones, as
    pytorch_model.bin in bfloat16.

    The matrices are views of one block of numbers, at which each begins elsewhere: the file is as large as the largest
    of them, while a loader reads every one.
    """
    matrices = {name: shape for name, shape in shapes.items() if len(shape) == 2}
    spread = 1 / math.sqrt(max(columns for _, columns in matrices.values()))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    size = max(map(math.prod, matrices.values())) + _SPARE
    numbers = torch.randn(size, device=device, dtype=torch.bfloat16).mul_(spread).cpu()
    starts = {name: index * _STRIDE % _SPARE for index, name in enumerate(matrices)}
    tensors = {
        name: numbers[starts[name] :][: math.prod(shape)].view(shape)
        if name in matrices
        else torch.ones(shape, dtype=torch.bfloat16)
        for name, shape in shapes.items()
    }
    torch.save(tensors, folder / "pytorch_model.bin")


def decoder_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the tensors of a Llama or a Qwen3 with its own output projection, by name."""
    hidden, wide, vocab, dim = (config[name] for name in ("hidden_size", "intermediate_size", "vocab_size", "head_dim"))
    queries, keys = (dim * config[name] for name in ("num_attention_heads", "num_key_value_heads"))
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm": (hidden,), "self_attn.q_proj": (queries, hidden), "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden), "self_attn.o_proj": (hidden, queries),
        "post_attention_layernorm": (hidden,), "mlp.gate_proj": (wide, hidden), "mlp.up_proj": (wide, hidden),
        "mlp.down_proj": (hidden, wide),
    }  # fmt: skip
    if config["model_type"] == "qwen3":
        layer |= {f"self_attn.{part}_norm": (dim,) for part in "qk"}
    return {
        "model.embed_tokens.weight": (vocab, hidden),
        **{
            f"model.layers.{index}.{name}.weight": shape
            for index in range(config["num_hidden_layers"])
            for name, shape in layer.items()
        },
        "model.norm.weight": (hidden,),
        "lm_head.weight": (vocab, hidden),
    }


def load_random_target(
    config: Mapping[str, Any], states: Sequence[int] | None, dtype: torch.dtype, device: torch.device
) -> tuple[DecoderTarget, Load]:
    """Write a target with this config.json, load it from its folder, and say what loading took. Raises CheckpointError
    for a model that this library's layers do not compute."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(config))
        save_random(folder, decoder_shapes(config))
        store = TensorStore.open(folder)
        if (why := unserved(store)) is not None:
            raise CheckpointError(f"our layers do not compute the model to time: {why}. Change its config.")
        return timed_load(lambda: load_target(store, lambda _: states, dtype=dtype, device=device), device)


def timed_load(load: Callable[[], DecoderTarget], device: torch.device) -> tuple[DecoderTarget, Load]:
    """Load a target, and return it with what that took."""
    on_cuda = device.type == "cuda"
    with suppress(OSError):
        _CLEAR_REFS.write_text(_RESET_PEAK)
    if on_cuda:
        torch.cuda.reset_peak_memory_stats(device)
    start = time.perf_counter()
    target = load()
    if on_cuda:
        torch.cuda.synchronize(device)
    seconds = time.perf_counter() - start
    status = _STATUS.read_text() if _STATUS.exists() else ""
    peak = re.search(r"^VmHWM:\s+(\d+) kB$", status, re.MULTILINE)
    return target, Load(
        seconds=round(seconds, 3),
        bytes=sum(each.nbytes for each in target.parameters()),
        host_peak=None if peak is None else int(peak[1]) << 10,
        device_peak=torch.cuda.max_memory_allocated(device) if on_cuda else None,
    )

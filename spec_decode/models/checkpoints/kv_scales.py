"""Calibrated scales of an 8-bit KV cache, which some checkpoints hold for each layer."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable

import torch

from spec_decode.models.checkpoints.config_reader import ConfigReader
from spec_decode.models.checkpoints.files import CheckpointError

LayerScales = dict[int, tuple[float, float]]
"""Layer -> the scales of its keys and of its values."""
SCHEME = "kv_cache_scheme"
_NAME = re.compile(r"model\.(?:language_model\.)?layers\.(\d{1,9})\.self_attn\.(?:([kv])_proj\.)?([kv])_scale")
_SCHEME: dict[str, bool | str | float] = {
    "num_bits": 8,
    "type": "float",
    "strategy": "tensor",
    "symmetric": True,
    "dynamic": False,
}


def scale_names(names: Iterable[str]) -> frozenset[str]:
    """Return those of a checkpoint's tensors that are such scales."""
    found = {name: _NAME.fullmatch(name) for name in names}
    return frozenset(name for name, match in found.items() if match and match[2] in (None, match[3]))


def has_scheme(section: ConfigReader) -> bool:
    """Return whether quantization_config says that the checkpoint has such scales. Raises CheckpointError for others
    than of e4m3, one for each layer."""
    if section.values.get(SCHEME) is None:
        return False
    scheme = section.section(SCHEME)
    for field, expected in _SCHEME.items():
        scheme.require(field, expected)
    return True


def read_scales(
    names: Iterable[str], read: Callable[[str], torch.Tensor], layers: Collection[int], place: str
) -> LayerScales:
    """Read the scales of these layers; empty without any. read: returns a stored tensor. place: the folder.

    Raises CheckpointError for a layer that lacks one or has two, and for a scale that is not one positive number.
    """
    found: dict[tuple[int, str], float] = {}
    for name in sorted(names):
        match, scale = _NAME.fullmatch(name), read(name)
        assert match is not None
        one = scale.is_floating_point() and scale.numel() == 1
        if not one or not (scale > 0).all() or not scale.isfinite().all():
            raise CheckpointError(
                f"{name} in {place} must be one positive, finite number, got {scale.dtype} {list(scale.shape)} "
                f"{scale.flatten()[:3].tolist()}; 8-bit keys or values would be read wrongly. Calibrate the model "
                "again, with a scale for each tensor."
            )
        if (key := (int(match[1]), match[3])) in found:
            raise CheckpointError(f"{place} has two scales for layer {key[0]}, {name} is one. Restore the file.")
        found[key] = float(scale)
    wanted = {(layer, part) for layer in layers for part in "kv"}
    if found and found.keys() != wanted:
        (layer, part), *_ = sorted(found.keys() ^ wanted)
        why = "is missing" if (layer, part) in wanted else "belongs to no such layer"
        raise CheckpointError(
            f"{place} has scales of an 8-bit KV cache, but not exactly one for keys and one for values in each of "
            f"{len(layers)} layers: {part}_scale of layer {layer} {why}. Complete the download."
        )
    return {layer: (found[layer, "k"], found[layer, "v"]) for layer in layers} if found else {}

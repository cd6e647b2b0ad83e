"""What quantization_config says of FP8 weights: which modules have them, and what their scales belong to."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from spec_decode.models.checkpoints.config_reader import ConfigReader
from spec_decode.models.checkpoints.files import CheckpointError
from spec_decode.models.checkpoints.kv_scales import SCHEME, has_scheme

FIELD = "quantization_config"
_READ = frozenset({
    "quant_method", "format", "config_groups", "ignore", "sparsity_config", "fmt", "weight_block_size",
    "modules_to_not_convert", "ignored_layers", SCHEME,
    "quantization_status", "global_compression_ratio", "version", "activation_scheme", "scale_fmt",
})  # fmt: skip
"""The fields that are read, and after them those that say nothing of how the weights are stored."""
_WEIGHTS: dict[str, bool | str | float] = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
_MOST_REPEATS = 4
"""The most repeats in a pattern: the time to match a name grows with its length to their power."""
_REMEDY = "Use a bf16 copy, with weights='fp8' for 8 bits."


@dataclass(frozen=True, slots=True)
class Fp8Layout:
    """Which modules have FP8 weights.

    method      the name of the layout
    strategies  what a scale can belong to: a `tensor`, a `channel` (an output), or a `block`
    block       rows and columns of a block
    ignored     the names of modules that stay in 16 bits
    targets     the names of the others
    caches      whether the checkpoint has scales of an 8-bit KV cache
    """

    method: str
    strategies: frozenset[str]
    block: tuple[int, int]
    ignored: re.Pattern[str]
    targets: re.Pattern[str]
    caches: bool = False

    def quantises(self, module: str) -> bool:
        """Whether a linear layer of this name is in FP8."""
        return self.ignored.match(module) is None and self.targets.match(module) is not None


def read_fp8_layout(config: ConfigReader) -> Fp8Layout | None:
    """Read quantization_config; None without it, and for weights in another format. Raises CheckpointError for FP8
    weights beside something that this library does not compute."""
    if not isinstance(config.values.get(FIELD), dict):
        return None
    section = config.section(FIELD)
    method, form = (section.values.get(name) for name in ("quant_method", "format"))
    if method == "compressed-tensors" and form == "float-quantized":
        layout = _read_groups(section)
    elif method == "fp8" and section.values.get("fmt", "e4m3") == "e4m3":
        layout = _read_blocks(section)
    else:
        return None
    for name, value in section.values.items():
        if value and name not in _READ:
            raise CheckpointError(f"{section.place} has {name:.80}, {value!r:.80}, which is not read. {_REMEDY}")
    return layout


def _read_groups(section: ConfigReader) -> Fp8Layout:
    """Read the config of compressed-tensors, in which groups of modules have a scheme each."""
    section.section("sparsity_config").require("format", "dense")
    targets, found, groups = list[str](), dict[str, ConfigReader](), section.section("config_groups")
    for name in groups.values:
        weights = groups.section(name).section("weights")
        for field, expected in _WEIGHTS.items():
            weights.require(field, expected)
        found[weights.get("strategy", str)] = weights
        targets += _names(groups.section(name), "targets")
    if len(found) != 1 or not found.keys() <= {"tensor", "channel", "block"}:
        raise CheckpointError(
            f"strategy must be tensor, channel or block in all {groups.place}, got {sorted(found)!r:.80}. {_REMEDY}"
        )
    ignored, chosen = (
        [name[3:] if name.startswith("re:") else f"{re.escape(name)}$" for name in names if name != "Linear"]
        for names in (_names(section, "ignore"), targets)
    )
    every = re.compile("") if "Linear" in targets else _pattern(section, chosen)
    (weights,) = found.values()
    if "block" in found and weights.values.get("block_structure") is None:
        raise CheckpointError(
            f"strategy in {weights.place} is block, and there is no block_structure, the size of a block. Restore the "
            "file."
        )
    return Fp8Layout(
        "compressed-tensors",
        frozenset(found),
        _block(weights, "block_structure"),
        _pattern(section, ignored),
        every,
        has_scheme(section),
    )


def _read_blocks(section: ConfigReader) -> Fp8Layout:
    """Read the config of transformers, DeepSeek and Qwen, or vLLM's older one for a scale of each tensor."""
    # Without the field, transformers assumes blocks and vLLM a scale for each tensor.
    assumed = {"tensor", "block"}
    if "weight_block_size" in section.values:
        assumed = {"tensor" if section.values["weight_block_size"] is None else "block"}
    block = _block(section, "weight_block_size")
    return Fp8Layout("fp8", frozenset(assumed), block, unconverted_modules(section), re.compile(""))


def unconverted_modules(section: ConfigReader) -> re.Pattern[str]:
    """Return a pattern of the modules that a quantization_config of transformers leaves as they are. Raises
    CheckpointError."""
    names = [*_names(section, "modules_to_not_convert"), *_names(section, "ignored_layers")]
    return _pattern(section, [rf"(.*\.)?(?:{name})(\..*)?$" for name in names])


def _block(section: ConfigReader, name: str) -> tuple[int, int]:
    sizes = section.get(name, list, [128, 128])
    if len(sizes) != 2 or not all(type(size) is int and size > 0 for size in sizes):
        raise CheckpointError(f"{name} in {section.place} must be two sizes, got {sizes!r:.80}. Restore the file.")
    return sizes[0], sizes[1]


def _names(section: ConfigReader, name: str) -> list[str]:
    names = section.get(name, list, [])
    if not all(isinstance(each, str) for each in names):
        raise CheckpointError(f"{name} in {section.place} must be names, got {names!r:.80}. Restore the file.")
    return names


def _pattern(section: ConfigReader, parts: Sequence[str]) -> re.Pattern[str]:
    """Compile a pattern that matches the start of a name as one of the parts does; none of them matches nothing."""
    for part in parts:
        repeats, options = (len(re.findall(kind, part)) for kind in (r"[*+{]", r"(?<!\()\?"))
        if repeats > _MOST_REPEATS or options > 2 * _MOST_REPEATS or re.search(r"\)[*+{]", part):
            raise CheckpointError(
                f"{section.place} has the pattern {part!r:.80}, which repeats a group or too many characters: a match "
                "could take hours. Write a simpler one."
            )
        try:
            re.compile(part)
        except re.error as error:
            raise CheckpointError(f"{section.place} has the pattern {part!r:.80}: {error}. Restore it.") from error
    return re.compile("|".join(f"(?:{part})" for part in parts) if parts else r"(?!)")

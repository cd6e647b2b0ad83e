"""Tell what a folder holds from its file names and config.json, before any weight is read, and reject what cannot be
loaded: adapters, GGUF files, and quantised weights."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from spec_decode.models.checkpoints.config_reader import ConfigReader
from spec_decode.models.checkpoints.files import CheckpointError, read_object
from spec_decode.models.checkpoints.fp8_layout import FIELD, read_fp8_layout

_ADAPTER_CONFIG = "adapter_config.json"
_ADAPTER = (_ADAPTER_CONFIG, "adapter_model.safetensors", "adapter_model.bin")
_MXFP4 = {"quant_method", "modules_to_not_convert", "dequantize"}
"""What it can say of MXFP4. The tensors show which modules are in it."""
_QUANTISED = (FIELD, "compression_config", "quantization")
"""Fields of config.json that describe quantised weights: transformers', compressed-tensors' older one, and MLX's."""
_QUANTISED_FILES = ("hf_quant_config.json", "quantize_config.json", "quant_config.json")
"""The same as files, by ModelOpt, AutoGPTQ and AutoAWQ."""
_METHODS = ("quant_method", "quant_algo", "quant_type", "format", "fmt")
_FP8 = "of FP8 only e4m3 in 'fp8' or float-quantized is read"
_FORMATS = {
    "of 4-bit floats only MXFP4 is read, as GPT-OSS describes it": ("fp4",),
    _FP8: ("fp8", "float"),
    "8-bit integers are not read": ("int-quantized", "int8"),
    "of compressed-tensors only float-quantized is read": ("naive-quantized", "mixed-precision"),
    "integers of few bits are not read": ("awq", "gptq", "round", "pack-quantized", "hqq", "quanto", "bits", "int4"),
}
"""Families of formats, and words in the names of their methods."""
_MAX_QUOTED = 80


def read_config(folder: Path) -> dict[str, Any]:
    """Read the config.json of a model or a draft. Raises CheckpointError, which says what the folder holds instead."""
    _refuse_adapter(folder)
    path = folder / "config.json"
    if folder.is_dir() and not path.exists():
        if files := sorted(folder.glob("*.gguf")):
            raise CheckpointError(
                f"{folder} holds a GGUF file, {files[0].name}, and no config.json; GGUF is not read. Use the folder of "
                "the same model in bf16, with config.json and safetensors."
            )
        raise CheckpointError(f"{folder} has no config.json. Pass the folder of a downloaded model.")
    return read_object(path, "Pass the folder of a downloaded model.")


def refuse_quantised(folder: Path, config: dict[str, Any], *, narrow: bool = False, draft: bool = False) -> None:
    """Raise CheckpointError if config.json, a section of it, or a file beside it describes quantised weights. narrow:
    not for the FP8 weights and MXFP4 experts that targets on this library's layers read. draft: it holds a draft."""
    place = str(folder / "config.json")
    readable = is_mxfp4(config) or read_fp8_layout(ConfigReader(config, place)) is not None
    if narrow and readable:
        config = {name: value for name, value in config.items() if name != FIELD}
    if (found := next(_quantised(folder, config), None)) is not None:
        where, method = found
        known = (what for what, words in _FORMATS.items() if any(word in method.lower() for word in words))
        what = next(known, "this format is not read")
        problem = f"{what}. Use"
        if what == _FP8 and where not in (f"{FIELD} in {place}", *_QUANTISED_FILES):
            problem = f"FP8 is described by {FIELD} at the top of config.json only. Move it there, or use"
        if readable and not narrow:
            problem = (
                "a draft reads none. Use" if draft else "a target in transformers reads none. Leave target out, or use"
            )
        raise CheckpointError(
            f"{folder} holds quantised weights: {where} has method {method!r:.{_MAX_QUOTED}}; {problem} a bf16 copy, "
            "with weights or draft_weights='fp8' for 8 bits, or serve it in vLLM with the plug-in."
        )


def is_mxfp4(config: Mapping[str, Any]) -> bool:
    """Whether config.json says that GPT-OSS's weights are in MXFP4, and nothing more of them."""
    section = config.get(FIELD)
    if config.get("model_type") != "gpt_oss" or not isinstance(section, dict):
        return False
    return section.get("quant_method") == "mxfp4" and section.keys() <= _MXFP4


def _refuse_adapter(folder: Path) -> None:
    if (file := next((name for name in _ADAPTER if (folder / name).exists()), None)) is None:
        return
    base, kind = "its base model", "PEFT"
    if (folder / _ADAPTER_CONFIG).is_file():
        config = read_object(folder / _ADAPTER_CONFIG, "Restore the file.")
        base = str(config.get("base_model_name_or_path") or base)[:_MAX_QUOTED]
        kind = str(config.get("peft_type") or kind)[:_MAX_QUOTED]
    beside = " beside a model" if (folder / "config.json").exists() else ", not a model"
    raise CheckpointError(
        f"{folder} holds an adapter ({kind}, {file}){beside}; adapters are not applied. Merge it into {base} with "
        "PEFT's merge_and_unload, save the result with save_pretrained, and pass that folder."
    )


def _quantised(folder: Path, config: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield each place that describes quantised weights, and the method that it names."""
    top = ConfigReader(config, str(folder / "config.json"))
    inner = [name for name, value in config.items() if isinstance(value, dict) and name not in _QUANTISED]
    for section in (top, *map(top.section, inner)):
        for name in _QUANTISED:
            if section.values.get(name):
                yield f"{name} in {section.place}", _method(section.values[name])
    for file in _QUANTISED_FILES:
        if (folder / file).is_file():
            yield file, _method(read_object(folder / file, "Restore the file."))


def _method(described: Any) -> str:
    """Return the names that describe a quantisation, or the whole description without one."""
    if not isinstance(described, dict):
        return str(described)
    inner = described.get("quantization")
    sections = [described, *([inner] if isinstance(inner, dict) else [])]
    named = [str(section[name]) for section in sections for name in _METHODS if section.get(name)]
    if not named and "bits" in described:
        named = [f"{described['bits']} bits"]
    return " ".join(dict.fromkeys(named)) or json.dumps(described)

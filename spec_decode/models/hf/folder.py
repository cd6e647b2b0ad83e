"""Load a `transformers` model and its tokenizer from a local folder, without downloads and without running its code."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from spec_decode.models.checkpoints.config_reader import ConfigReader
from spec_decode.models.checkpoints.files import (
    CheckpointError,
    in_short,
    read_object,
    require_plain_utf8,
    require_regular,
    shortened,
)
from spec_decode.models.checkpoints.folder_kind import read_config, refuse_quantised
from spec_decode.models.checkpoints.store import TensorStore, check_weights
from spec_decode.models.hf import absent

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_READ_FIRST = ("config.json", "generation_config.json", "tokenizer_config.json")
"""Files that the library ignores if it cannot read them, or whose errors it attributes to something else."""
_OTHER_INPUTS = ("vision_config", "audio_config", "thinker_config", "vision_tower")
"""Ends of fields that only configs of multimodal models have."""
_NO_CODE = {"config.json": {"trust_remote_code": False}}
"""Arguments for the files that can name classes of the folder's own code."""
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
_TOKENIZER_PARTS = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
_PACKED = {".qweight": "weights of GPTQ or AWQ", ".weight_packed": "packed weights", "_blocks": "weights of MXFP4"}
"""Name suffixes of quantised weights."""
_CACHE_SCALES = (".k_scale", ".v_scale", ".kv_scale")
"""Name suffixes of the scales of an 8-bit KV cache, which no target here uses."""


def load_model(folder: Path, *, dtype: torch.dtype, device: torch.device | str = "cpu") -> PreTrainedModel:
    """Load the causal language model in a folder (config.json; weights in safetensors or .bin), by way of host memory.

    Classes from the folder's own code (auto_map) are never created, only the library's. Raises CheckpointError for an
    incomplete model and for classes that the library lacks.
    """
    from transformers import AutoModelForCausalLM

    check_model(folder)
    _refuse_narrow(TensorStore.open(folder))
    try:
        model, loading_info = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # reported below by name
        )
    except Exception as error:  # from the library, its dependencies or a model's code
        raise CheckpointError(
            f"the installed transformers cannot load a causal language model from {folder}: {in_short(error)}. "
            "Correct its config.json, or update transformers."
        ) from error
    if mismatched := sorted(loading_info["mismatched_keys"]):
        name, stored, expected = mismatched[0]
        raise CheckpointError(
            f"{len(mismatched)} tensors in {folder} have other shapes than its config.json says, {name} first: "
            f"{list(stored)}, not {list(expected)}. Use weights and config.json from the same model."
        )
    if missing := sorted(loading_info["missing_keys"]):
        raise CheckpointError(
            f"the weights in {folder} lack {len(missing)} of the model's tensors, as transformers names them: "
            f"{shortened(missing)}; those would be random. Complete the download, or restore config.json."
        )
    if extra := _unexpected_tensors(loading_info["unexpected_keys"], model):
        raise CheckpointError(
            f"the weights in {folder} have tensors unexpected by {type(model).__name__}, {len(extra)} in all: "
            f"{shortened(extra)}; ignoring them would change the outputs. Restore config.json and the weights, "
            "or convert them to bf16 if they are quantised."
        )
    model.to(device)
    for parameter in model.parameters():
        if parameter.is_cpu:
            # It maps the file, which could be changed or cut while the model runs.
            parameter.data = parameter.data.clone()
    return model


def _refuse_narrow(store: TensorStore) -> None:
    """Raise CheckpointError for 8-bit floats, which `transformers` would read without their scales, and for integers
    that stand for weights."""
    for name in sorted(store.names()):
        packed = next((form for end, form in _PACKED.items() if name.endswith(end)), None)
        if packed or ((dtype := store.peek(name).dtype).is_floating_point and dtype.itemsize == 1):
            raise CheckpointError(
                f"{name} in {store.folder} has {packed or dtype}, and config.json has no quantization_config. Restore "
                "config.json, or use a bf16 copy."
            )


def load_generation_config(folder: Path) -> Any:
    """Load what generation_config.json says of generating, or without that file config.json. Raises CheckpointError."""
    from transformers import AutoConfig, GenerationConfig

    _require_valid_configs(folder)
    if (folder / "generation_config.json").is_file():
        return GenerationConfig.from_pretrained(folder, local_files_only=True)
    return GenerationConfig.from_model_config(
        AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    )


def check_model(folder: Path, *, narrow: bool = False) -> None:
    """Raise CheckpointError for a folder that `load_model` rejects before it reads tensors, and without the library.
    Call it before anything else is loaded. narrow: do not reject FP8 and MXFP4 weights, which this library's layers
    read."""
    try:
        import transformers  # noqa: F401
    except ImportError as error:
        raise CheckpointError(absent(error)) from error
    if not folder.is_dir():
        raise CheckpointError(f"there is no folder {folder}. Pass the folder of a downloaded model.")
    config = read_config(folder)
    _require_readable(folder)
    refuse_quantised(folder, config, narrow=narrow)
    _refuse_other_tasks(folder, config)
    _require_valid_configs(folder)
    check_weights(folder)


def _refuse_other_tasks(folder: Path, config: dict[str, Any]) -> None:
    """Raise CheckpointError for a model that `transformers` knows and that is no causal language model."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    kind = ConfigReader(config, str(folder / "config.json")).get("model_type", str)
    several = any(name.endswith(_OTHER_INPUTS) for name in config)
    if kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or not (several or kind in CONFIG_MAPPING_NAMES):
        return
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names and isinstance(names[0], str) else f"a {kind} model"
    what = "a multimodal model" if several else "no causal language model"
    raise CheckpointError(
        f"{folder} holds {name:.80} (model_type {kind:.40}), {what}; only the classes of transformers' "
        "AutoModelForCausalLM are served. Use a text model, or serve this one in vLLM with the plug-in."
    )


def _require_valid_configs(folder: Path) -> None:
    """Raise CheckpointError for a config that the library rejects: it would blame the weights or the tokenizer."""
    from transformers import AutoConfig, GenerationConfig

    for file, kind in (("config.json", AutoConfig), ("generation_config.json", GenerationConfig)):
        if not (folder / file).is_file():
            continue
        try:
            kind.from_pretrained(folder, local_files_only=True, **_NO_CODE.get(file, {}))
        except Exception as error:
            _refuse_custom_code(folder / file, error)
            from spec_decode.models.hf.state_layers import unknown_layer

            why = unknown_layer(read_object(folder / file, "Restore the file.").get("layer_types")) or in_short(error)
            raise CheckpointError(
                f"the installed transformers rejects {folder / file}: {why}. Restore the file, or update transformers."
            ) from error


def _unexpected_tensors(unexpected: Iterable[str], model: PreTrainedModel) -> list[str]:
    """Return the tensors inside a part that the model has, such as its list of layers. Others belong to another head, a
    vision tower, a cache's scales, or a draft, whose layers can follow the model's own in that list."""
    parts = {path for path, _ in model.named_modules()} - {"", model.base_model_prefix}
    config = model.config.get_text_config()
    num_drafts = getattr(config, "num_nextn_predict_layers", None)
    first = config.num_hidden_layers
    drafts = [f".layers.{first + layer}." for layer in range(num_drafts if isinstance(num_drafts, int) else 0)]
    return sorted(
        name
        for name in unexpected
        if not name.endswith(_CACHE_SCALES)
        and not any(draft in name for draft in drafts)
        and any(name[:dot] in parts for dot, character in enumerate(name) if character == ".")
    )


def has_tokenizer(folder: Path) -> bool:
    """Whether the folder holds a tokenizer for `load_tokenizer`."""
    return (folder / "tokenizer_config.json").is_file()


def load_tokenizer(folder: Path) -> Any:
    """Load the tokenizer in a folder. Raises CheckpointError if there is none."""
    from transformers import AutoTokenizer

    _require_file(folder, "tokenizer_config.json")
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # as above: they share no class, and a panic in Rust is not an Exception
        _refuse_custom_code(folder / "tokenizer_config.json", error)
        raise CheckpointError(
            f"the tokenizer in {folder} cannot be read: {_faulty_file(folder)}: {in_short(error)}. Restore the "
            "tokenizer's files."
        ) from error


def _faulty_file(folder: Path) -> str:
    """Say which of its files keeps a tokenizer from being loaded. Raises CheckpointError for one that is no JSON
    object, and for a config.json that the library rejects."""
    for name in ("tokenizer.json", *_TOKENIZER_PARTS):
        if (folder / name).is_file() and name.endswith(".json"):
            read_object(folder / name, "Restore the file.")
    _require_valid_configs(folder)
    models = [name for name in _TOKENIZERS if (folder / name).is_file()]
    if not models:
        return f"it has none of {', '.join(_TOKENIZERS)}"
    if models[0] != "tokenizer.json":
        return f"{models[0]} or tokenizer_config.json is wrong"
    from tokenizers import Tokenizer

    try:
        Tokenizer.from_file(str(folder / "tokenizer.json"))
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException:
        return "tokenizer.json is wrong"
    return " or ".join(name for name in _TOKENIZER_PARTS if (folder / name).is_file()) + " is wrong"


def _refuse_custom_code(path: Path, error: BaseException) -> None:
    """Raise CheckpointError if a file names classes of the folder's own code: only the library's are created."""
    if read_object(path, "Restore the file.").get("auto_map"):
        raise CheckpointError(
            f"{path} has an auto_map to code in its folder, which is never run. Use a model that the installed "
            "transformers supports, or update it."
        ) from error


def _require_file(folder: Path, file: str) -> None:
    if not (folder / file).is_file():
        problem = f"{folder} has no {file}" if folder.is_dir() else f"there is no folder {folder}"
        raise CheckpointError(f"{problem}. Pass the folder of a downloaded model.")
    _require_readable(folder)


def _require_readable(folder: Path) -> None:
    """Raise CheckpointError for a file that the library would ignore, wait for, or blame on another."""
    for path in sorted(folder.iterdir()):  # the library opens every file with a name that it knows
        try:
            require_regular(path)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}. Remove it.") from error
        if path.suffix == ".json" and path.is_file():
            require_plain_utf8(path)
        if path.name in _READ_FIRST:
            read_object(path, "Restore the file.")

"""Load a `transformers` model and its tokenizer from a local folder, without downloads and without running its code."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from spec_decode.models.checkpoints.files import (
    CheckpointError,
    check_safetensors,
    read_object,
    require_plain_utf8,
    require_regular,
    shortened,
)
from spec_decode.models.checkpoints.store import read_index, weights_file

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_READ_FIRST = ("config.json", "generation_config.json", "tokenizer_config.json")
"""Files that the library ignores if it cannot read them, or whose errors it attributes to something else."""
_CACHE_SCALES = (".k_scale", ".v_scale", ".kv_scale")
"""Name suffixes of the scales of an 8-bit KV cache, which no target here uses."""


def load_model(folder: Path, *, dtype: torch.dtype, device: torch.device | str = "cpu") -> PreTrainedModel:
    """Load the causal language model in a folder (config.json; weights in safetensors or .bin), by way of host memory.

    Classes from the folder's own code (auto_map) are never created, only the library's. Raises CheckpointError for an
    incomplete model and for classes that the library lacks.
    """
    from transformers import AutoModelForCausalLM

    _require_file(folder, "config.json")
    if (weights := weights_file(folder)) is not None and weights.suffix == ".json":
        read_index(weights)  # rejects paths out of the folder, which the library would follow
    for shard in sorted(folder.glob("*.safetensors")):
        check_safetensors(shard)
    try:
        model, loading_info = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, local_files_only=True, trust_remote_code=False, output_loading_info=True
        )
    except Exception as error:  # from the library, its dependencies or a model's code
        _refuse_custom_code(folder / "config.json", error)
        raise CheckpointError(
            f"the installed transformers cannot load a causal language model from {folder}: {error}. "
            "Restore the folder, or update transformers."
        ) from error
    if missing := sorted(loading_info["missing_keys"]):
        raise CheckpointError(
            f"the weights in {folder} lack {len(missing)} of the model's tensors: {shortened(missing)}; those would be "
            "random. Complete the download."
        )
    if extra := _unexpected_tensors(loading_info["unexpected_keys"], model):
        raise CheckpointError(
            f"the weights in {folder} have {len(extra)} tensors unexpected by {type(model).__name__}: "
            f"{shortened(extra)}; ignoring them would change the outputs. Restore config.json and the weights, "
            "or convert them to bf16 if they are quantised."
        )
    return model.to(device)


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
            f"the tokenizer in {folder} cannot be read: {error}. Restore the tokenizer's files."
        ) from error


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
    for path in sorted(folder.iterdir()):  # the library opens every file with a name that it knows
        try:
            require_regular(path)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}. Remove it.") from error
        if path.suffix == ".json" and path.is_file():
            require_plain_utf8(path)
        if path.name in _READ_FIRST:
            read_object(path, "Restore the file.")

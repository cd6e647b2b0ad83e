"""A target and its drafts on disk: config.json, and <name>.safetensors for `target`, `draft` and any further draft.

training.json records how the pair was trained, <name>.training.json how a further draft was. A block draft has its own
folder <name> in the published layout, with its training.json; its entry in config.json is null.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
import torch
from safetensors.torch import load_file, save_file

from attn_backends.kernels.linear.fp8_weight import Fp8Weight
from spec_decode.model_api import DraftModel
from spec_decode.models.checkpoints.files import CheckpointError, check_safetensors, is_finite, read_object
from spec_decode.models.config import ModelConfig
from spec_decode.models.decoder_weights import published_tensors
from spec_decode.models.dflash import DFlash
from spec_decode.models.draft import check_shared
from spec_decode.models.eagle import EagleDraft
from spec_decode.models.llama import LlamaTarget
from spec_decode.models.load import aux_hidden_state_layers, load_draft

SHIPPED_PAIR = Path(__file__).parents[2] / "attn_backends_pairs" / "pydoc"
"""This library's own byte-level pair: in every checkout, elsewhere once attn-backends-pairs is installed."""

STORED_DTYPE = torch.bfloat16

M = TypeVar("M", LlamaTarget, EagleDraft)


class _Index(NamedTuple):
    """The content of config.json: the target, and each draft by name, None for one in its own folder."""

    target: ModelConfig
    drafts: dict[str, ModelConfig | None]


def save_pair(folder: Path, target: LlamaTarget, draft: EagleDraft, training: dict[str, Any]) -> None:
    """Save a pair in bf16, with `training` as its record. Drops the folder's further drafts: they fit another target.

    Raises CheckpointError, with nothing written, for a draft in 8 bits.
    """
    _check_unquantised(draft)
    folder.mkdir(parents=True, exist_ok=True)
    _write_json(folder / "config.json", {"target": target.config, "draft": draft.config})
    _write_json(folder / "training.json", training)
    _write_state(folder / "target.safetensors", target.state_dict())
    _write_state(folder / "draft.safetensors", _stored_state(draft))


def save_draft(folder: Path, name: str, draft: EagleDraft | DFlash, training: dict[str, Any]) -> None:
    """Save one more draft for the target in a folder, in bf16, with `training` as its record.

    Raises CheckpointError, with nothing written, for a folder without a pair, an invalid name, or a draft in 8 bits.
    """
    _check_unquantised(draft)
    index = _read_index(folder / "config.json")
    if name in ("target", "draft") or not name.isidentifier():
        raise CheckpointError(
            f"name must be an identifier other than target and draft, got {name!r}. Choose another name."
        )
    if isinstance(draft, EagleDraft):
        _check_fits(folder, name, draft.config, index.target)
        _write_state(folder / f"{name}.safetensors", _stored_state(draft))
        _write_json(folder / f"{name}.training.json", training)
        index.drafts[name] = draft.config
    else:
        _check_fits(folder, name, draft.config.model, index.target)
        _write_published(folder / name, draft, training)
        index.drafts[name] = None
    _write_json(folder / "config.json", {"target": index.target, **index.drafts})


def draft_names(folder: Path) -> list[str]:
    """Return the names of the drafts in a folder, `draft` first. Raises CheckpointError if there is no pair."""
    return ["draft", *sorted(_read_index(folder / "config.json").drafts.keys() - {"draft"})]


def load_target(folder: Path, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> LlamaTarget:
    """Load the target from a folder, ready to run. Raises CheckpointError for any problem in it."""
    config = _read_index(folder / "config.json").target
    return _load(folder, "target", lambda: LlamaTarget(config), dtype, device)


def load_pair(
    folder: Path, *, draft: str = "draft", dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> tuple[LlamaTarget, DraftModel]:
    """Load the target and the named draft from a folder, ready to run; sinks stay fp32.

    Raises CheckpointError for any problem in the folder.
    """
    index = _read_index(folder / "config.json")
    if draft not in (names := draft_names(folder)):
        raise CheckpointError(f"the drafts in {folder} are {', '.join(names)}, got {draft!r:.200}. Name one of those.")
    config = index.drafts[draft]
    if config is None:
        _check_states(folder / draft, index.target.num_layers)
        target = load_target(folder, dtype=dtype, device=device)
        return target, load_draft(folder / draft, target, dtype=dtype, device=device)
    _check_fits(folder, draft, config, index.target)
    target = load_target(folder, dtype=dtype, device=device)
    return target, _load(folder, draft, lambda: EagleDraft(config, target), dtype, device)


def _check_unquantised(draft: DraftModel) -> None:
    if any(isinstance(part, Fp8Weight) for part in draft.modules()):
        raise CheckpointError(
            "a draft with 8-bit weights cannot be saved. Save it before quantise_draft, or load it again."
        )


def _check_fits(folder: Path, name: str, draft: ModelConfig, target: ModelConfig) -> None:
    for field in ("vocab_size", "hidden_size"):
        check_shared(f"the {name} in {folder}", field, getattr(draft, field), getattr(target, field))


def _check_states(folder: Path, num_layers: int) -> None:
    if (layers := aux_hidden_state_layers(folder, num_layers)) not in (None, (num_layers,)):
        raise CheckpointError(
            f"target_layer_ids of the draft in {folder} must be the target's last layer, {num_layers - 1}, got "
            f"{[layer - 1 for layer in layers or ()]}. Use a draft trained on this target."
        )


def _write_published(folder: Path, draft: DFlash, training: dict[str, Any]) -> None:
    folder.mkdir(exist_ok=True)
    _write_json(folder / "config.json", draft.config_json)
    _write_json(folder / "training.json", training)
    _write_state(folder / "model.safetensors", published_tensors(draft))


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, default=asdict, indent=1) + "\n")


def _stored_state(draft: EagleDraft) -> dict[str, torch.Tensor]:
    """Return the parameters under their names in files, in which the draft's one layer has no number."""
    return {name.replace("layers.0.", "layer."): value for name, value in draft.state_dict().items()}


def _write_state(path: Path, state: Mapping[str, torch.Tensor]) -> None:
    # Copied, because save_file rejects tensors that share memory.
    save_file({name: value.to("cpu", STORED_DTYPE, copy=True).contiguous() for name, value in state.items()}, path)


def _read_index(path: Path) -> _Index:
    ours = "The weights are a package of their own: pip install ./attn_backends_pairs in a checkout of attn-backends."
    values = read_object(path, ours if path.parent == SHIPPED_PAIR else "Pass the folder that holds config.json.")
    if missing := {"target", "draft"} - values.keys():
        raise CheckpointError(f"{path} lacks {sorted(missing)}. Add the missing config.")
    try:
        target = msgspec.convert(values.pop("target"), ModelConfig)
        return _Index(target, msgspec.convert(values, dict[str, ModelConfig | None]))
    except msgspec.MsgspecError as error:
        raise CheckpointError(f"{path} must hold a config for 'target' and 'draft': {error}. Fix the file.") from error


def _load(folder: Path, name: str, make: Callable[[], M], dtype: torch.dtype, device: torch.device | str) -> M:
    try:
        with torch.device("meta"):
            model = make()
    except (RuntimeError, ValueError) as error:
        raise CheckpointError(
            f"the models in {folder / 'config.json'} cannot be created: {error}. Fix their sizes."
        ) from error
    path = folder / f"{name}.safetensors"
    check_safetensors(path)
    state = load_file(path)
    if wrong := [name for name, value in state.items() if not is_finite(value)]:
        raise CheckpointError(f"{wrong[0]} in {path} must hold finite numbers, got NaN or infinity. Restore the file.")
    if isinstance(model, EagleDraft):
        state = {name.replace("layer.", "layers.0."): value for name, value in state.items()}
    # Assigned, so parameters get dtype while the rotary tables stay fp32. Sinks stay fp32 too: kernels read them so.
    typed = {name: value.to(torch.float32 if name.endswith("sinks") else dtype) for name, value in state.items()}
    try:
        model.load_state_dict(typed, assign=True)
    except RuntimeError as error:
        message = " ".join(str(error).split())
        raise CheckpointError(f"{path} does not fit its config.json: {message:.1000}. Use matching files.") from error
    return model.eval().requires_grad_(False).to(device)

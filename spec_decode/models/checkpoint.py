"""A pair on disk: config.json, target.safetensors, draft.safetensors, and training.json for where it came from."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from spec_decode.models.config import ModelConfig
from spec_decode.models.eagle import EagleDraft
from spec_decode.models.llama import LlamaTarget

SHIPPED_PAIR = Path(__file__).parent.parent / "pairs" / "pydoc"
"""The byte-level pair that travels with the package."""

STORED_DTYPE = torch.bfloat16


class CheckpointError(ValueError):
    """A checkpoint that cannot be loaded; the message says what is wrong with which file."""


def save_pair(folder: Path, target: LlamaTarget, draft: EagleDraft, training: dict[str, Any]) -> None:
    """Write a pair in bf16, with `training` as its record."""
    folder.mkdir(parents=True, exist_ok=True)
    configs = {"target": asdict(target.config), "draft": asdict(draft.config)}
    (folder / "config.json").write_text(json.dumps(configs, indent=1) + "\n")
    (folder / "training.json").write_text(json.dumps(training, indent=1) + "\n")
    for name, model in (("target", target), ("draft", draft)):
        state = {key: value.to(STORED_DTYPE).cpu().contiguous() for key, value in model.state_dict().items()}
        save_file(state, folder / f"{name}.safetensors")


def load_pair(
    folder: Path, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> tuple[LlamaTarget, EagleDraft]:
    """The target and its draft from a folder, ready to run. Raises CheckpointError for anything amiss in it."""
    configs = _read_configs(folder / "config.json")
    target_config, draft_config = configs["target"], configs["draft"]
    for name in ("vocab_size", "hidden_size"):
        ours, theirs = getattr(draft_config, name), getattr(target_config, name)
        if ours != theirs:
            raise CheckpointError(
                f"a draft shares its target's {name}, the draft in {folder} has {ours} and the target {theirs}; its "
                "hidden states would mean nothing. Use a draft trained on this target."
            )
    try:
        target = LlamaTarget(target_config)
        draft = EagleDraft(draft_config, target)
    except RuntimeError as error:
        raise CheckpointError(
            f"the models of {folder / 'config.json'} cannot be made: {error}; nothing was loaded. Fix their sizes."
        ) from error
    _fill(target, folder / "target.safetensors", dtype)
    target.to(device)
    _fill(draft, folder / "draft.safetensors", dtype)
    return target, draft.to(device)


def _read_configs(path: Path) -> dict[str, ModelConfig]:
    try:
        configs = msgspec.json.decode(path.read_bytes(), type=dict[str, ModelConfig])
    except OSError as error:
        raise CheckpointError(
            f"a pair needs {path}, which cannot be read: {error.strerror}; nothing was loaded. Name the folder that "
            "holds config.json."
        ) from error
    except msgspec.MsgspecError as error:
        raise CheckpointError(
            f"{path} must hold a config for 'target' and 'draft': {error}; nothing was loaded. Fix the file."
        ) from error
    if missing := {"target", "draft"} - configs.keys():
        raise CheckpointError(f"{path} lacks {sorted(missing)}; nothing was loaded. Add the missing config.")
    return configs


def _fill(model: nn.Module, path: Path, dtype: torch.dtype) -> None:
    try:
        state = load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{path} cannot be read as safetensors: {error}; it is missing, truncated or corrupt, and nothing was "
            "loaded. Restore the file."
        ) from error
    _check_state(path, model, state)
    # Assigned, so that parameters take dtype while the rotary tables stay fp32.
    model.load_state_dict({name: value.to(dtype) for name, value in state.items()}, assign=True)
    model.eval().requires_grad_(False)


def _check_state(path: Path, model: nn.Module, state: dict[str, torch.Tensor]) -> None:
    wanted = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    found = {name: tuple(value.shape) for name, value in state.items()}
    problems = [f"{name} is missing" for name in sorted(wanted.keys() - found.keys())]
    problems += [f"{name} is not part of the model" for name in sorted(found.keys() - wanted.keys())]
    problems += [
        f"{name} must be {wanted[name]}, got {found[name]}"
        for name in sorted(wanted.keys() & found.keys())
        if wanted[name] != found[name]
    ]
    if problems:
        raise CheckpointError(
            f"{path} does not fit its config.json: {'; '.join(problems[:8])}"
            f"{f'; and {len(problems) - 8} more' if len(problems) > 8 else ''}. Nothing was loaded; use matching files."
        )

"""A target and its drafts on disk: config.json, and <name>.safetensors for `target`, `draft` and any further draft.

Where they came from is in training.json for the pair and in <name>.training.json for a further draft.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from spec_decode.models.checkpoints.errors import CheckpointError
from spec_decode.models.checkpoints.files import check_safetensors, is_finite, read_object
from spec_decode.models.config import ModelConfig
from spec_decode.models.draft import check_shared
from spec_decode.models.eagle import EagleDraft
from spec_decode.models.layers.rope import RotaryEmbedding
from spec_decode.models.llama import LlamaTarget

SHIPPED_PAIR = Path(__file__).parent.parent / "pairs" / "pydoc"
"""The byte-level pair that travels with the package."""

STORED_DTYPE = torch.bfloat16

M = TypeVar("M", LlamaTarget, EagleDraft)


def save_pair(folder: Path, target: LlamaTarget, draft: EagleDraft, training: dict[str, Any]) -> None:
    """Write a pair in bf16, with `training` as its record. Further drafts, made for another target, are not kept."""
    folder.mkdir(parents=True, exist_ok=True)
    _write_json(folder / "config.json", {"target": target.config, "draft": draft.config})
    _write_json(folder / "training.json", training)
    _write_state(folder, "target", target)
    _write_state(folder, "draft", draft)


def save_draft(folder: Path, name: str, draft: EagleDraft, training: dict[str, Any]) -> None:
    """Write one more draft of the target in a folder, in bf16, with `training` as its record.

    Raises CheckpointError, with nothing written, for a folder without a pair or a name that no draft can have.
    """
    configs = _read_configs(folder / "config.json")
    if name in ("target", "draft") or not name.isidentifier():
        raise CheckpointError(
            f"a further draft is named like a variable, and neither target nor draft, got {name!r}; nothing was "
            "written. Choose another name."
        )
    _check_fits(folder, name, draft.config, configs["target"])
    _write_state(folder, name, draft)
    _write_json(folder / f"{name}.training.json", training)
    _write_json(folder / "config.json", {**configs, name: draft.config})


def draft_names(folder: Path) -> list[str]:
    """The drafts in a folder, `draft` first. Raises CheckpointError where there is no pair."""
    return ["draft", *sorted(_read_configs(folder / "config.json").keys() - {"target", "draft"})]


def load_target(folder: Path, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> LlamaTarget:
    """The target from a folder, ready to run. Raises CheckpointError for anything amiss."""
    config = _read_configs(folder / "config.json")["target"]
    return _load(folder, "target", lambda: LlamaTarget(config), dtype, device)


def load_pair(
    folder: Path, *, draft: str = "draft", dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> tuple[LlamaTarget, EagleDraft]:
    """The target and the draft of that name from a folder, ready to run; sinks stay fp32.

    Raises CheckpointError for anything amiss in it.
    """
    configs = _read_configs(folder / "config.json")
    if draft not in (names := draft_names(folder)):
        raise CheckpointError(
            f"the drafts in {folder} are {', '.join(names)}, got {draft!r}; nothing was loaded. Name one of those."
        )
    _check_fits(folder, draft, configs[draft], configs["target"])
    target = load_target(folder, dtype=dtype, device=device)
    return target, _load(folder, draft, lambda: EagleDraft(configs[draft], target), dtype, device)


def _check_fits(folder: Path, name: str, draft: ModelConfig, target: ModelConfig) -> None:
    for field in ("vocab_size", "hidden_size"):
        check_shared(f"the {name} in {folder}", field, getattr(draft, field), getattr(target, field))


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, default=asdict, indent=1) + "\n")


def _write_state(folder: Path, name: str, model: nn.Module) -> None:
    state = {key: value.to(STORED_DTYPE).cpu().contiguous() for key, value in model.state_dict().items()}
    save_file(state, folder / f"{name}.safetensors")


def _read_configs(path: Path) -> dict[str, ModelConfig]:
    try:
        values = read_object(path, "Name the folder that holds config.json.")
        configs = msgspec.convert(values, dict[str, ModelConfig])
    except msgspec.MsgspecError as error:
        raise CheckpointError(
            f"{path} must hold a config for 'target' and 'draft': {error}; nothing was loaded. Fix the file."
        ) from error
    if missing := {"target", "draft"} - configs.keys():
        raise CheckpointError(f"{path} lacks {sorted(missing)}; nothing was loaded. Add the missing config.")
    return configs


def _load(folder: Path, name: str, make: Callable[[], M], dtype: torch.dtype, device: torch.device | str) -> M:
    try:
        with torch.device("meta"):
            model = make()
    except (RuntimeError, ValueError) as error:
        raise CheckpointError(
            f"the models of {folder / 'config.json'} cannot be made: {error}; nothing was loaded. Fix their sizes."
        ) from error
    path = folder / f"{name}.safetensors"
    check_safetensors(path)
    state = load_file(path)
    _check_state(path, model, state)
    # Assigned, so that parameters take dtype while the rotary tables stay fp32; so do sinks, as kernels take them.
    typed = {name: value.to(torch.float32 if name.endswith("sinks") else dtype) for name, value in state.items()}
    model.load_state_dict(typed, assign=True)
    model.rotary = RotaryEmbedding(model.config)
    return model.eval().requires_grad_(False).to(device)


def _check_state(path: Path, model: nn.Module, state: dict[str, torch.Tensor]) -> None:
    wanted = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    found = {name: tuple(value.shape) for name, value in state.items()}
    problems = [f"{name} must hold finite numbers" for name, value in state.items() if not is_finite(value)]
    problems += [f"{name} is missing" for name in sorted(wanted.keys() - found.keys())]
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

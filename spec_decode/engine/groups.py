"""The KV groups of a model, each on the backend that was chosen for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

import torch

from attn_backends import AttentionBackend
from builders.errors import require
from spec_decode.drafter.kv_groups import KVGroup, make_group
from spec_decode.models import DraftModel, LayerGroup, TargetModel

BackendChoice: TypeAlias = AttentionBackend | Mapping[str, AttentionBackend] | Callable[[LayerGroup], AttentionBackend]
"""One backend for all of a model's groups, one for each group's name, or a function that chooses."""


def make_groups(
    name: str,
    model: TargetModel | DraftModel,
    choice: BackendChoice,
    page_size: int,
    num_pages: int,
    device: torch.device,
) -> list[KVGroup]:
    """Groups with caches of num_pages pages, in the model's order, called `name`, and by their own names if several.

    Raises BatchError for a mapping without one of the groups, and NoBackend for a backend that refuses one.
    """
    layer_groups = model.layer_groups(page_size)
    backends = [_backend(name, group, choice) for group in layer_groups]
    return [
        make_group(
            name if len(layer_groups) == 1 else f"{name} {group.name}",
            backend,
            group.spec,
            group.layers,
            num_pages=num_pages,
            device=device,
        )
        for group, backend in zip(layer_groups, backends, strict=True)
    ]


def _backend(name: str, group: LayerGroup, choice: BackendChoice) -> AttentionBackend:
    if isinstance(choice, AttentionBackend):
        return choice
    if not isinstance(choice, Mapping):
        return choice(group)
    require(
        group.name in choice,
        f"every KV group of the {name} needs a backend, {group.name!r} has none among {sorted(choice)}; nothing was "
        "allocated. Add it, or pass one backend for all.",
    )
    return choice[group.name]

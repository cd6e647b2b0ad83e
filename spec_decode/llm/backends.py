"""Choose the backends of a target and its draft, and explain why the others were not chosen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from attn_backends import BackendError, MissingPackage, NoBackend, Rejected, registry, select
from attn_backends.registry import Backend
from builders import StateSpec
from spec_decode.engine import EngineConfig
from spec_decode.engine.config import group_options
from spec_decode.llm.pair import Pair
from spec_decode.model_api import DraftModel, LayerGroup, TargetModel
from spec_decode.paged.kv_groups import layer_groups_of, state_groups_of

AnyGroup: TypeAlias = LayerGroup | LayerGroup[StateSpec]


@dataclass(frozen=True, slots=True)
class Backends:
    """The backends of target and draft, by layer group."""

    target: dict[str, Backend]
    draft: dict[str, Backend]

    @staticmethod
    def names(chosen: dict[str, Backend]) -> str:
        """Return each backend name once, in order of the groups."""
        return ", ".join(dict.fromkeys(backend.name for backend in chosen.values()))


def requested_groups(model: TargetModel | DraftModel, config: EngineConfig) -> list[AnyGroup]:
    """Return the model's layer groups, then a target's state groups; their specs request the features that the config
    needs."""
    groups, tree = layer_groups_of(model, group_options(config, model)), config.tree is not None
    states = state_groups_of(model, config.query_len, tree=tree) if isinstance(model, TargetModel) else []
    return [*groups, *states]


def choose_backends(
    pair: Pair, config: EngineConfig, backend: str | None = None, draft_backend: str | None = None
) -> Backends:
    """Choose for each group the first backend that supports it, or the requested one.

    backend: of attention, or of recurrent states; groups of the other kind get the first. draft_backend: for the draft;
    None uses backend if that attends. Raises NoBackend if a requested backend does not support a group, or there is no
    group of its kind: there is no fallback.
    """
    device, for_states = pair.device, backend in registry.state_names()
    draft_choice = draft_backend if draft_backend is not None or for_states else backend
    target = _chosen(requested_groups(pair.target, config), device, backend)
    if pair.draft is None:
        return Backends(target, {})
    try:
        draft = _chosen(requested_groups(pair.draft, config), device, draft_choice)
    except NoBackend as refusal:
        if draft_choice == draft_backend:
            raise
        raise NoBackend(f"{refusal} This is the draft's attention: choose its backend with draft_backend.") from refusal
    return Backends(target, draft)


def backends_named(pair: Pair, config: EngineConfig, name: str) -> Backends | None:
    """Choose this backend for the draft, and for the target if it supports that; None if it cannot serve the draft."""

    def serves(model: TargetModel | DraftModel) -> bool:
        attending = [group.spec for group in requested_groups(model, config) if not isinstance(group.spec, StateSpec)]
        return all(registry.explain(name, spec, pair.device) for spec in attending)

    if pair.draft is None or not serves(pair.draft):
        return None
    return choose_backends(pair, config, name if serves(pair.target) else None, name)


def _chosen(groups: Sequence[AnyGroup], device: torch.device, backend: str | None) -> dict[str, Backend]:
    found: dict[str, Backend] = {}
    for_states = backend in registry.state_names()
    for group in groups:
        named = [backend] if backend is not None and isinstance(group.spec, StateSpec) is for_states else []
        found[group.name] = select(group.spec, device, named).backend
    if for_states and not any(isinstance(group.spec, StateSpec) for group in groups):
        raise NoBackend(f"{backend} keeps recurrent states, and the model has none. Name a backend of attention.")
    return found


def explain_backends(pair: Pair, backends: Backends, config: EngineConfig) -> list[str]:
    """Explain for each layer group which backend serves it and why no other does; then list those not installed."""
    absent = [name for name in (*registry.names(), *registry.state_names()) if not _is_installed(name)]
    lines = []
    for name, model, chosen in (("target", pair.target, backends.target), ("draft", pair.draft, backends.draft)):
        for group in requested_groups(model, config) if model is not None else ():
            own = chosen[group.name].name
            lines.append(f"{name} [{group.spec.describe()}]: {own}")
            others = registry.state_names() if isinstance(group.spec, StateSpec) else registry.names()
            for other in (other for other in others if other not in (own, *absent)):
                verdict = registry.explain(other, group.spec, pair.device)
                why = "; ".join(verdict.reasons) if isinstance(verdict, Rejected) else "would serve it too"
                lines.append(f"  not {other}: {why}")
    if absent:
        lines.append(f"not installed: {', '.join(absent)}; attn-backends list says how to install each")
    return lines


def _is_installed(name: str) -> bool:
    """Return whether a backend's packages are installed; a broken installation counts as installed."""
    try:
        registry.load(name)
    except BackendError as error:
        return not isinstance(error, MissingPackage)
    return True

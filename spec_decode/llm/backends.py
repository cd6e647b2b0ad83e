"""Which backends serve the attention of a target and its draft, and why the others do not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from attn_backends import AttentionBackend, BackendError, MissingPackage, NoBackend, Rejected, registry, select
from spec_decode.engine import EngineConfig
from spec_decode.llm.pair import Pair
from spec_decode.models import DraftModel, LayerGroup, TargetModel
from spec_decode.paged.kv_groups import layer_groups_of


@dataclass(frozen=True, slots=True)
class Backends:
    """Who serves the attention of target and draft, by layer group."""

    target: dict[str, AttentionBackend]
    draft: dict[str, AttentionBackend]

    @staticmethod
    def names(chosen: dict[str, AttentionBackend]) -> str:
        """Each name once, in the order of the groups."""
        return ", ".join(dict.fromkeys(backend.name for backend in chosen.values()))


def groups_asked(model: TargetModel | DraftModel, config: EngineConfig) -> list[LayerGroup]:
    """The model's layer groups, whose specs ask for what the config does."""
    return layer_groups_of(
        model, config.page_size, batch_invariant=config.batch_invariant, tree=config.tree is not None
    )


def choose_backends(
    pair: Pair, config: EngineConfig, backend: str | None = None, draft_backend: str | None = None
) -> Backends:
    """For each group the first backend that serves it, or the one asked for, the draft's too unless it has its own.

    Raises NoBackend where one that was asked for cannot serve: there is no fallback.
    """
    device, asked = pair.device, backend if draft_backend is None else draft_backend
    target = _chosen(groups_asked(pair.target, config), device, backend)
    if pair.draft is None:
        return Backends(target, {})
    try:
        draft = _chosen(groups_asked(pair.draft, config), device, asked)
    except NoBackend as refusal:
        if asked == draft_backend:
            raise
        raise NoBackend(f"{refusal} This is the draft's attention: name its backend with draft_backend.") from refusal
    return Backends(target, draft)


def backends_named(pair: Pair, config: EngineConfig, name: str) -> Backends | None:
    """The backend of that name for the draft, and for the target too where it serves it; None: not even the draft."""

    def serves(model: TargetModel | DraftModel) -> bool:
        return all(registry.explain(name, group.spec, pair.device) for group in groups_asked(model, config))

    if pair.draft is None or not serves(pair.draft):
        return None
    return choose_backends(pair, config, name if serves(pair.target) else None, name)


def _chosen(groups: Sequence[LayerGroup], device: torch.device, asked: str | None) -> dict[str, AttentionBackend]:
    return {group.name: select(group.spec, device, [] if asked is None else [asked]).backend for group in groups}


def explain_backends(pair: Pair, backends: Backends, config: EngineConfig) -> list[str]:
    """For each layer group the backend that serves it, and why each other one does not; then those not installed."""
    absent = [name for name in registry.names() if not _is_installed(name)]
    lines = []
    for name, model, chosen in (("target", pair.target, backends.target), ("draft", pair.draft, backends.draft)):
        for group in groups_asked(model, config) if model is not None else ():
            own = chosen[group.name].name
            lines.append(f"{name} [{group.spec.describe()}]: {own}")
            for other in (other for other in registry.names() if other not in (own, *absent)):
                verdict = registry.explain(other, group.spec, pair.device)
                why = "; ".join(verdict.reasons) if isinstance(verdict, Rejected) else "would serve it too"
                lines.append(f"  not {other}: {why}")
    if absent:
        lines.append(f"not installed: {', '.join(absent)}; attn-backends list says how to install each")
    return lines


def _is_installed(name: str) -> bool:
    """Whether the packages of a backend are there; one that is broken is."""
    try:
        registry.get(name)
    except BackendError as error:
        return not isinstance(error, MissingPackage)
    return True

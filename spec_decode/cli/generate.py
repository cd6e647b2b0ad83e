"""Generation by a pair: its backends, an engine whose graphs are captured first, and what came out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from attn_backends import AttentionBackend, NoBackend, registry, select
from spec_decode.cli.byte_pair import Pair
from spec_decode.drafter.kv_groups import layer_groups_of
from spec_decode.drafter.plan import DraftPlan
from spec_decode.engine import Engine, EngineConfig, EngineStats, Generation, Request
from spec_decode.models import DraftModel, LayerGroup, TargetModel

_MAX_REQS = 8
_WARM_UP_TOKENS = 2
"""The prefill gives the first, a round the second."""


@dataclass(frozen=True, slots=True)
class Backends:
    """Who serves the attention of target and draft, by layer group."""

    target: dict[str, AttentionBackend]
    draft: dict[str, AttentionBackend]

    @staticmethod
    def names(chosen: dict[str, AttentionBackend]) -> str:
        """Each name once, in the order of the groups."""
        return ", ".join(dict.fromkeys(backend.name for backend in chosen.values()))


@dataclass(frozen=True, slots=True)
class GenerateResult:
    """What a run produced; plan is None for plain decoding."""

    generations: list[Generation]
    stats: EngineStats
    plan: DraftPlan | None


def groups_asked(model: TargetModel | DraftModel, config: EngineConfig) -> list[LayerGroup]:
    """The model's layer groups, whose specs ask for what the config does."""
    return layer_groups_of(
        model, config.page_size, batch_invariant=config.batch_invariant, tree=config.tree is not None
    )


def choose_backends(
    pair: Pair, config: EngineConfig, backend: str | None = None, draft_backend: str | None = None
) -> Backends:
    """For each group the first backend that serves it, or the one asked for, the draft's too unless it has its own.

    Raises NoBackend where one that was asked for cannot serve; no other is taken in its place.
    """
    device, asked = pair.device, backend if draft_backend is None else draft_backend
    target = _chosen(groups_asked(pair.target, config), device, backend)
    try:
        draft = _chosen(groups_asked(pair.draft, config), device, asked)
    except NoBackend as refusal:
        if asked == draft_backend:
            raise
        raise NoBackend(f"{refusal} This is the draft's attention: name its backend with --draft-backend.") from refusal
    return Backends(target, draft)


def backends_named(pair: Pair, config: EngineConfig, name: str) -> Backends | None:
    """The backend of that name for the draft, and for the target too where it serves it; None: not even the draft."""

    def serves(model: TargetModel | DraftModel) -> bool:
        return all(registry.explain(name, group.spec, pair.device) for group in groups_asked(model, config))

    if not serves(pair.draft):
        return None
    return choose_backends(pair, config, name if serves(pair.target) else None, name)


def _chosen(groups: Sequence[LayerGroup], device: torch.device, asked: str | None) -> dict[str, AttentionBackend]:
    return {group.name: select(group.spec, device, [] if asked is None else [asked]).backend for group in groups}


def generate(pair: Pair, backends: Backends, requests: Sequence[Request], config: EngineConfig) -> GenerateResult:
    """Continue the requests. Graphs are captured and kernels compiled before: the stats time neither.

    config: for requests of any number and length.
    """
    longest = max(len(request.prompt) + request.max_new_tokens for request in requests)
    config = replace(config, max_reqs=min(len(requests), _MAX_REQS), max_seq_len=max(longest, 1 + _WARM_UP_TOKENS))
    engine = Engine(pair.target, pair.draft, backends.target, config, draft_backend=backends.draft)
    engine.capture()
    engine.generate([Request(prompt=requests[0].prompt[:1], max_new_tokens=_WARM_UP_TOKENS)])
    return GenerateResult(engine.generate(requests), engine.stats, engine.plan)

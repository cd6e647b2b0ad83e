"""Drafting as `draft` and `demo` do it: a pair, its backends, an engine with graphs captured, and what came out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from attn_backends import AttentionBackend, NoBackend, select
from builders import AttentionSpec
from spec_decode.cli.common import UserError
from spec_decode.drafter.plan import DraftPlan, Strategy
from spec_decode.engine import Engine, EngineStats, Generation, Request
from spec_decode.models import DraftModel, EagleDraft, LayerGroup, LlamaTarget, TargetModel, load_pair
from spec_decode.models.byte_tokenizer import BOS, decode, encode

PAGE_SIZE = 16
_BYTES = 256
_MAX_REQS = 8
_WARM_UP_TOKENS = 2
"""The prefill gives the first, a round the second."""


class Pair(Protocol):
    """A target and its draft on one device, and the way between text and their tokens."""

    @property
    def target(self) -> TargetModel: ...

    @property
    def draft(self) -> DraftModel: ...

    @property
    def stop_ids(self) -> frozenset[int]:
        """The tokens that end a text."""
        ...

    def encode(self, text: str) -> list[int]:
        """The tokens of a prompt. Raises UserError for text that has none."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of tokens."""
        ...


@dataclass(frozen=True, slots=True)
class BytesPair:
    """A byte-level pair of one layer group each."""

    target: LlamaTarget
    draft: EagleDraft

    @property
    def target_spec(self) -> AttentionSpec:
        """The attention of the target's layers."""
        return self.target.layer_groups(PAGE_SIZE)[0].spec

    @property
    def draft_spec(self) -> AttentionSpec:
        """The attention of the draft's layer."""
        return self.draft.layer_groups(PAGE_SIZE)[0].spec

    @property
    def stop_ids(self) -> frozenset[int]:
        return frozenset({BOS})

    def encode(self, text: str) -> list[int]:
        """Raises UserError for text that is not utf-8."""
        try:
            return encode(text)
        except UnicodeEncodeError as error:
            raise UserError(f"a prompt must be utf-8, got {text!a}; nothing was run. Re-encode it.") from error

    def decode(self, token_ids: Sequence[int]) -> str:
        return decode(list(token_ids))


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
class Outcome:
    """What a run produced; plan is None for plain decoding."""

    generations: list[Generation]
    stats: EngineStats
    plan: DraftPlan | None


def device_of(pair: Pair) -> torch.device:
    """Where the pair's parameters are."""
    return next(pair.target.parameters()).device


def load_bytes_pair(folder: Path, dtype: torch.dtype, device: torch.device, *, draft: str = "draft") -> BytesPair:
    """A pair whose tokens are bytes; CheckpointError or UserError for anything else."""
    target, model = load_pair(folder, draft=draft, dtype=dtype, device=device)
    if target.config.vocab_size != _BYTES:
        raise UserError(
            f"prompts are read as bytes, which needs a vocabulary of {_BYTES}, the pair in {folder} has "
            f"{target.config.vocab_size}; nothing was run. Use a byte-level pair, or the engine from Python."
        )
    return BytesPair(target, model)


def choose_backends(
    pair: Pair, backend: str | None = None, draft_backend: str | None = None, *, page_size: int = PAGE_SIZE
) -> Backends:
    """For each group the first backend that serves it, or the one asked for, the draft's too unless it has its own.

    Raises BackendError where one that was asked for cannot serve; none is taken in its place.
    """
    device, asked = device_of(pair), draft_backend or backend
    target = _chosen(pair.target.layer_groups(page_size), device, backend)
    try:
        draft = _chosen(pair.draft.layer_groups(page_size), device, asked)
    except NoBackend as refusal:
        if asked == draft_backend:
            raise
        raise NoBackend(f"{refusal} This is the draft's attention: name its backend with --draft-backend.") from refusal
    return Backends(target, draft)


def _chosen(groups: Sequence[LayerGroup], device: torch.device, asked: str | None) -> dict[str, AttentionBackend]:
    return {group.name: select(group.spec, device, [asked] if asked else []).backend for group in groups}


def generate(
    pair: Pair,
    backends: Backends,
    requests: Sequence[Request],
    num_speculative_tokens: int,
    strategy: Strategy | None = None,
    verification: str = "rejection",
    page_size: int = PAGE_SIZE,
) -> Outcome:
    """Continue the requests. Graphs are captured and kernels compiled before: the stats time neither."""
    longest = max(len(request.prompt) + request.max_new_tokens for request in requests)
    engine = Engine(
        pair.target,
        pair.draft,
        backends.target,
        num_speculative_tokens=num_speculative_tokens,
        max_reqs=min(len(requests), _MAX_REQS),
        max_seq_len=max(longest, 1 + _WARM_UP_TOKENS),
        page_size=page_size,
        strategy=strategy,
        draft_backend=backends.draft,
        verification=verification,
    )
    engine.capture()
    engine.generate([Request(prompt=requests[0].prompt[:1], max_new_tokens=_WARM_UP_TOKENS)])
    return Outcome(engine.generate(requests), engine.stats, engine.plan)


def printable(text: str) -> str:
    """The text with control characters spelled out, so that none reaches a terminal."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)

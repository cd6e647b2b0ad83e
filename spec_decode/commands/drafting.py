"""Drafting as `draft` and `demo` do it: a pair, its backends, an engine with graphs captured, and what came out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from attn_backends import AttentionBackend, NoBackend, select
from builders import AttentionSpec
from spec_decode.commands.common import UserError
from spec_decode.engine import Engine, EngineStats, Generation, Request
from spec_decode.models import EagleDraft, LlamaTarget, load_pair
from spec_decode.strategy import DraftPlan, Strategy
from spec_decode.text import decode

PAGE_SIZE = 16
_BYTES = 256
_MAX_REQS = 8
_WARM_UP_TOKENS = 2
"""The prefill gives the first, a round the second."""


@dataclass(frozen=True, slots=True)
class Pair:
    """A byte-level pair on its device."""

    target: LlamaTarget
    draft: EagleDraft

    @property
    def target_spec(self) -> AttentionSpec:
        """The attention of the target's layers."""
        return self.target.config.attention_spec(PAGE_SIZE, self.dtype)

    @property
    def draft_spec(self) -> AttentionSpec:
        """The attention of the draft's layer."""
        return self.draft.config.attention_spec(PAGE_SIZE, self.dtype)

    @property
    def dtype(self) -> torch.dtype:
        return self.target.embed.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.target.embed.weight.device


@dataclass(frozen=True, slots=True)
class Backends:
    """Who serves the target's attention and who the draft's."""

    target: AttentionBackend
    draft: AttentionBackend


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run produced; plan is None for plain decoding."""

    generations: list[Generation]
    stats: EngineStats
    plan: DraftPlan | None

    def text(self, index: int) -> str:
        return decode(self.generations[index].token_ids)


def load_bytes_pair(folder: Path, dtype: torch.dtype, device: torch.device, *, draft: str = "draft") -> Pair:
    """A pair whose tokens are bytes; CheckpointError or UserError for anything else."""
    target, model = load_pair(folder, draft=draft, dtype=dtype, device=device)
    if target.config.vocab_size != _BYTES:
        raise UserError(
            f"prompts are read as bytes, which needs a vocabulary of {_BYTES}, the pair in {folder} has "
            f"{target.config.vocab_size}; nothing was run. Use a byte-level pair, or the engine from Python."
        )
    return Pair(target, model)


def choose_backends(pair: Pair, backend: str | None = None, draft_backend: str | None = None) -> Backends:
    """The first backend that serves each spec, or the ones asked for; `backend` is the draft's too unless it has one.

    Raises BackendError where one that was asked for cannot serve; none is taken in its place.
    """
    target = select(pair.target_spec, pair.device, [backend] if backend else [])
    asked = draft_backend or backend
    try:
        draft = select(pair.draft_spec, pair.device, [asked] if asked else [])
    except NoBackend as refusal:
        if asked == draft_backend:
            raise
        raise NoBackend(f"{refusal} This is the draft's attention: name its backend with --draft-backend.") from refusal
    return Backends(target.backend, draft.backend)


def generate(
    pair: Pair,
    backends: Backends,
    requests: Sequence[Request],
    num_speculative_tokens: int,
    strategy: Strategy | None = None,
    verification: str = "rejection",
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
        page_size=PAGE_SIZE,
        strategy=strategy,
        draft_backend=backends.draft,
        verification=verification,
    )
    if engine.drafter:
        engine.drafter.capture()
        engine.generate([Request(prompt=requests[0].prompt[:1], max_new_tokens=_WARM_UP_TOKENS)])
    return Outcome(engine.generate(requests), engine.stats, engine.plan)


def printable(text: str) -> str:
    """The text with control characters spelled out, so that none reaches a terminal."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)

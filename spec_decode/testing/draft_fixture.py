"""The draft fixture: a small random draft model on the backend under test, and requests for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

import torch

from builders import AttentionKind, AttentionSpec, RequestTables
from spec_decode.drafter import Drafter, DrafterConfig, Strategy
from spec_decode.model_api import LayerGroup
from spec_decode.paged.kv_groups import KVGroup, make_group
from spec_decode.testing.batches import with_trees
from spec_decode.testing.plain_draft import PlainDraft
from spec_decode.testing.specs_run import note_spec
from spec_decode.testing.subject import Subject

MAX_SEQ_LEN = 96
_WINDOWS = 4
"""Sliding windows in the longest request."""


class DraftShape(Enum):
    """The layers of the model."""

    ONE = "one"
    LAYERS = "layers"
    """Two layers in one group."""
    GROUPS = "groups"
    """Two one-layer groups of one spec, plus one without the window if the backend supports that."""


@dataclass(frozen=True, slots=True)
class DraftFixture:
    """A model on the backend with n requests; all random values are drawn from fixed seeds."""

    subject: Subject
    model: PlainDraft
    num_reqs: int
    num_speculative_tokens: int
    max_seq_len: int = MAX_SEQ_LEN
    _kept: dict[object, Drafter] = field(default_factory=dict)

    @classmethod
    def make(
        cls,
        subject: Subject,
        num_reqs: int,
        num_speculative_tokens: int,
        shape: DraftShape = DraftShape.ONE,
        *,
        trees: bool = False,
        kind: type[PlainDraft] = PlainDraft,
        max_seq_len: int = MAX_SEQ_LEN,
        page_size: int | None = None,
    ) -> DraftFixture:
        """Make the fixture with a model of the backend's draft spec. trees: its batches can be trees. page_size: None
        for the base spec's.

        Raises Unsupported if the backend rejects these specs.
        """
        groups = _layer_groups(subject, shape, _draft_spec(subject, max_seq_len // _WINDOWS, page_size))
        if trees:
            groups = tuple(replace(group, spec=with_trees(group.spec)) for group in groups)
            for group in groups:
                subject.require_supported(group.spec)
        for group in groups:
            note_spec(group.spec)
        model = kind(groups, max_seq_len + 32, subject.device)
        return cls(subject, model, num_reqs, num_speculative_tokens, max_seq_len)

    @property
    def layer_groups(self) -> tuple[LayerGroup, ...]:
        """The model's groups."""
        return self.model.groups

    @property
    def spec(self) -> AttentionSpec:
        """The first group's spec."""
        return self.layer_groups[0].spec

    @property
    def pages(self) -> list[list[list[int]]]:
        """Per group, the pages of each request, enough for max_seq_len tokens."""
        each = -(-self.max_seq_len // self.spec.page_size)
        seeds = [self.num_reqs + 1000 * group for group in range(len(self.layer_groups))]
        orders = [
            torch.randperm(self.num_reqs * each, generator=torch.Generator().manual_seed(seed)).tolist()
            for seed in seeds
        ]
        return [[order[r * each : (r + 1) * each] for r in range(self.num_reqs)] for order in orders]

    def contexts(self) -> list[int]:
        """Return the KV tokens before the first round: at page edges, around the window, and near the limit."""
        size, window = self.spec.page_size, self.spec.sliding_window or 8
        near_limit = self.max_seq_len - 2 * self.num_speculative_tokens - 3
        edges = [size - 1, window - 1, 0, 2 * size, window, near_limit, size, window + 1, 5]
        return [max(0, edges[r % len(edges)]) + (r // len(edges)) for r in range(self.num_reqs)]

    def limits(self) -> list[int]:
        """Return the token limit of each request. Every third request reaches it within two rounds."""
        return [
            min(self.max_seq_len, context + 2 * self.num_speculative_tokens + 2) if r % 3 == 2 else self.max_seq_len
            for r, context in enumerate(self.contexts())
        ]

    @property
    def num_pages(self) -> int:
        return sum(len(row) for row in self.pages[0])

    def groups(self) -> list[KVGroup]:
        """Allocate fresh caches, filled with the same noise each time: the logical context of every request."""
        return [_noisy_group(self.subject, g.spec, self.num_pages, g.layers) for g in self.layer_groups]

    def tables(self) -> RequestTables:
        """Make empty tables for these requests."""
        return RequestTables(
            page_sizes=[group.spec.page_size for group in self.layer_groups],
            num_pages=[self.num_pages] * len(self.layer_groups),
            max_reqs=self.num_reqs,
            max_seq_len=self.max_seq_len,
            device=self.subject.device,
        )

    def drafter(self, strategy: Strategy | None, **options: Any) -> Drafter:
        """Make a drafter with its own caches and tables. strategy: None for the allowed strategy with the least host
        work. options: further fields of its DrafterConfig. Raises StrategyError for a strategy that the backend does
        not allow."""
        config = DrafterConfig(num_speculative_tokens=self.num_speculative_tokens, strategy=strategy, **options)
        return Drafter(self.model, self.groups(), self.tables(), config)

    def kept_drafter(self, strategy: Strategy | None, **options: Any) -> Drafter:
        """Return the fixture's one drafter of these arguments, which must be hashable, with its caches as new: graphs
        are captured once for all runs."""
        key = (strategy, *options.items())
        if key not in self._kept:
            return self._kept.setdefault(key, self.drafter(strategy, **options))
        for group in self._kept[key].groups:
            _fill_with_noise(group)
        return self._kept[key]


def _draft_spec(subject: Subject, window: int, page_size: int | None) -> AttentionSpec:
    """Return the base spec with a window that the contexts outgrow, and with sinks in a latent layer, if supported."""
    base = subject.base_spec()
    if page_size is not None:
        base = replace(base, page_size=page_size)
        subject.require_supported(base)
    windowed = replace(base, sliding_window=window)
    latent = base.kind is AttentionKind.MLA
    with_sinks = [replace(spec, sinks=True) for spec in (windowed, base) if latent]
    return next(spec for spec in (*with_sinks, windowed, base) if subject.backend.supports(spec, subject.device))


def _layer_groups(subject: Subject, shape: DraftShape, spec: AttentionSpec) -> tuple[LayerGroup, ...]:
    if shape is not DraftShape.GROUPS:
        return (LayerGroup(name="draft", spec=spec, layers=(0, 1) if shape is DraftShape.LAYERS else (0,)),)
    whole = replace(spec, sliding_window=None)
    specs = [spec, spec, *([whole] if whole != spec and subject.backend.supports(whole, subject.device) else [])]
    return tuple(LayerGroup(name=f"draft {i}", spec=each, layers=(i,)) for i, each in enumerate(specs))


def _noisy_group(subject: Subject, spec: AttentionSpec, num_pages: int, layers: Sequence[int]) -> KVGroup:
    """Make a group of these layers whose fresh caches hold noise, the same each time."""
    group = make_group("draft", subject.backend, spec, layers, num_pages=num_pages, device=subject.device)
    _fill_with_noise(group)
    return group


def _fill_with_noise(group: KVGroup) -> None:
    """Fill a group's caches with noise, the same each time."""
    generator = torch.Generator().manual_seed(7 + min(group.caches))
    for cache in group.caches.values():
        for part in (cache.key, cache.value):
            part.copy_(torch.randn(part.shape, generator=generator).to(part.dtype))

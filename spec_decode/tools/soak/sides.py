"""The two drafters of a soak, and the comparison of a round that both have run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from builders import AttentionSpec, RequestTables
from spec_decode.drafter import Drafter, DrafterConfig, Drafts, Strategy, VerifiedTokens
from spec_decode.drafter.kv_groups import KVGroup
from spec_decode.models import DraftModel
from spec_decode.testing.draft_fixture import noisy_group
from spec_decode.testing.poison import bits
from spec_decode.testing.subject import Subject
from spec_decode.tools.soak.result import Failure
from spec_decode.tools.soak.schedule import Round, Setting

Propose = Callable[[VerifiedTokens], Drafts]


@dataclass(frozen=True, slots=True)
class Side:
    """A drafter with tables and a cache of its own."""

    drafter: Drafter
    group: KVGroup

    @classmethod
    def make(
        cls, subject: Subject, spec: AttentionSpec, model: DraftModel, setting: Setting, strategy: Strategy | None
    ) -> Side:
        """strategy: None takes the one with the least host work that the backend allows."""
        group = noisy_group(subject, spec, setting.num_pages)
        tables = RequestTables(
            page_sizes=[spec.page_size],
            num_pages=[setting.num_pages],
            max_reqs=setting.max_reqs,
            max_seq_len=setting.max_seq_len,
            device=subject.device,
        )
        config = DrafterConfig(num_speculative_tokens=setting.steps, strategy=strategy)
        drafter = Drafter(model, [group], tables, config)
        return cls(drafter, group)

    @property
    def overflow(self) -> torch.Tensor:
        return self.drafter.tables.overflow

    def cache_bits(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values as integers: a NaN equals itself."""
        cache = self.group.caches[0]
        return bits(cache.key), bits(cache.value)

    def copy_cache(self, other: Side) -> None:
        """Take over the other side's cache."""
        for mine, its in zip(self.cache_bits(), other.cache_bits(), strict=True):
            mine.copy_(its)

    def draft(self, round_: Round, verified: VerifiedTokens, propose: Propose | None = None) -> Drafts:
        """Run the round; its tables are loaded whether or not anybody came or went. propose: None is the drafter's."""
        self.drafter.tables.load([[row.pages for row in round_.rows]], [row.limit for row in round_.rows])
        return (propose or self.drafter.propose)(verified)


def difference(round_: Round, tested: Side, drafts: Drafts, eager: Side, expected: Drafts) -> Failure | None:
    """The first thing in which the round is not eager's, or not what the host's arithmetic says; waits for the device.

    tokens [n, K], logits [n, K, V] where a token was drafted, overflow flags and the whole cache must be the same bits.
    """
    return (
        _in_tokens(round_, drafts.tokens.cpu(), expected.tokens.cpu())
        or _in_logits(round_, drafts, expected)
        or _in_flags(round_, tested, eager)
        or _in_cache(round_, tested, eager)
    )


def _in_tokens(round_: Round, found: torch.Tensor, expected: torch.Tensor) -> Failure | None:
    if (row := _first_row(found != expected)) is not None:
        return _failure(round_, "token", f"drafted {found[row].tolist()}, eager drafts {expected[row].tolist()}", row)
    for row, count in enumerate((found >= 0).sum(1).tolist()):
        if count != (room := round_.rows[row].drafts):
            return _failure(round_, "token", f"drafted {count} tokens, and eager too; it has room for {room}", row)
    return None


def _in_logits(round_: Round, drafts: Drafts, expected: Drafts) -> Failure | None:
    drafted = (drafts.tokens >= 0)[..., None]
    differs = (bits(drafts.logits) != bits(expected.logits)) & drafted
    if (row := _first_row(differs)) is not None:
        column = int(differs[row].any(1).nonzero()[0])
        apart = (drafts.logits[row, column] - expected.logits[row, column]).abs().max().item()
        return _failure(round_, "logit", f"column {column} is up to {apart:.2e} from eager's", row)
    if (row := _first_row(drafts.logits.isnan() & drafted)) is not None:
        return _failure(round_, "nan", "NaN among its logits, and among eager's", row)
    return None


def _in_flags(round_: Round, tested: Side, eager: Side) -> Failure | None:
    steps = tested.drafter.num_speculative_tokens
    found, expected = tested.overflow.tolist(), eager.overflow.tolist()
    for row, flags in enumerate(zip(found, expected, strict=True)):
        stopped = row < len(round_.rows) and round_.rows[row].drafts < steps
        if flags != (stopped, stopped):
            return _failure(round_, "flag", f"overflow {flags[0]}, eager's {flags[1]}, it must be {stopped:d}", row)
    return None


def _in_cache(round_: Round, tested: Side, eager: Side) -> Failure | None:
    for name, found, expected in zip(("key", "value"), tested.cache_bits(), eager.cache_bits(), strict=True):
        differs = (found != expected).flatten(2).any(2)
        if not differs.any():
            continue
        page, offset = differs.nonzero()[0].tolist()
        owner = next((row for row, its in enumerate(round_.rows) if page in its.pages), None)
        whose = "" if owner is not None else ", which no request owns"
        return _failure(round_, "cache", f"slot {offset} of page {page} of the {name} cache{whose}", owner)
    return None


def _failure(round_: Round, what: str, detail: str, row: int | None) -> Failure:
    request = round_.rows[row].request if row is not None and row < len(round_.rows) else None
    return Failure(round=round_.index, what=what, detail=detail, row=row, request=request)


def _first_row(differs: torch.Tensor) -> int | None:
    rows = differs.flatten(1).any(1)
    return int(rows.nonzero()[0]) if rows.any() else None

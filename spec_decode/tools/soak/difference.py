"""What differs between a round that the candidate and the eager reference have both run."""

from __future__ import annotations

import msgspec
import torch

from spec_decode.drafter import Drafts
from spec_decode.testing.poison import bits
from spec_decode.tools.soak.fixture import SoakDrafter
from spec_decode.tools.soak.result import Failure
from spec_decode.tools.soak.schedule import ScheduledRound


def difference(
    round_: ScheduledRound, candidate: SoakDrafter, drafts: Drafts, reference: SoakDrafter, expected: Drafts
) -> Failure | None:
    """The first thing in which the round is not eager's, or not what the host computes; waits for the device.

    drafts, expected: of the candidate and of the reference. tokens [n, K], logits [n, K, V] where a token was drafted,
    overflow flags and the whole cache must be the same bits.
    """
    found = (
        _in_tokens(round_, drafts.tokens.cpu(), expected.tokens.cpu())
        or _in_logits(round_, drafts, expected)
        or _in_flags(round_, candidate, reference)
        or _in_cache(round_, candidate, reference)
    )
    return found and msgspec.structs.replace(found, strategy=candidate.strategy)


def _in_tokens(round_: ScheduledRound, found: torch.Tensor, expected: torch.Tensor) -> Failure | None:
    if (row := _first_row(found != expected)) is not None:
        return _failure(round_, "token", f"drafted {found[row].tolist()}, eager drafts {expected[row].tolist()}", row)
    for row, count in enumerate((found >= 0).sum(1).tolist()):
        if count != (room := round_.rows[row].drafts):
            return _failure(round_, "token", f"drafted {count} tokens, and eager too; it has room for {room}", row)
    return None


def _in_logits(round_: ScheduledRound, drafts: Drafts, expected: Drafts) -> Failure | None:
    drafted = (drafts.tokens >= 0)[..., None]
    differs = (bits(drafts.logits) != bits(expected.logits)) & drafted
    if (row := _first_row(differs)) is not None:
        column = int(differs[row].any(1).nonzero()[0])
        distance = (drafts.logits[row, column] - expected.logits[row, column]).abs().max().item()
        return _failure(round_, "logit", f"column {column} is up to {distance:.2e} from eager's", row)
    if (row := _first_row(drafts.logits.isnan() & drafted)) is not None:
        return _failure(round_, "nan", "NaN among its logits, and among eager's", row)
    return None


def _in_flags(round_: ScheduledRound, candidate: SoakDrafter, reference: SoakDrafter) -> Failure | None:
    k = candidate.drafter.num_speculative_tokens
    found, expected = (each.drafter.tables.overflow.tolist() for each in (candidate, reference))
    for row, flags in enumerate(zip(found, expected, strict=True)):
        stopped = row < len(round_.rows) and round_.rows[row].drafts < k
        if flags != (stopped, stopped):
            return _failure(round_, "flag", f"overflow {flags[0]}, eager's {flags[1]}, it must be {stopped:d}", row)
    return None


def _in_cache(round_: ScheduledRound, candidate: SoakDrafter, reference: SoakDrafter) -> Failure | None:
    for name, found, expected in zip(("key", "value"), candidate.cache_bits(), reference.cache_bits(), strict=True):
        differs = (found != expected).flatten(2).any(2)
        if not differs.any():
            continue
        page, offset = differs.nonzero()[0].tolist()
        owner = next((row for row, its in enumerate(round_.rows) if page in its.pages), None)
        whose = "" if owner is not None else ", which no request owns"
        return _failure(round_, "cache", f"slot {offset} of page {page} of the {name} cache{whose}", owner)
    return None


def _failure(round_: ScheduledRound, what: str, detail: str, row: int | None) -> Failure:
    request = round_.rows[row].request if row is not None and row < len(round_.rows) else None
    return Failure(round=round_.index, what=what, detail=detail, row=row, request=request)


def _first_row(differs: torch.Tensor) -> int | None:
    rows = differs.flatten(1).any(1)
    return int(rows.nonzero()[0]) if rows.any() else None

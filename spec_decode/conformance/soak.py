"""A soak: rounds of a strategy compared with eager ones, while requests join and leave and memory stays flat."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import islice

import torch

from spec_decode.conformance.soak_rounds import SoakDrafter, soak_fixture, soak_rounds
from spec_decode.conformance.soak_schedule import ScheduledRound
from spec_decode.drafter import Drafts, Strategy, StrategyError, VerifiedTokens
from spec_decode.testing import memory
from spec_decode.testing.error_location import error_location
from spec_decode.testing.memory import MemoryReading
from spec_decode.testing.outcome import CheckFailure, Measurements, Unsupported
from spec_decode.testing.poison import bits
from spec_decode.testing.subject import Subject

_WARM_UP = 500
_RESIDENT_GROWTH = 16 << 20
"""Resident set growth allowed for fragmentation, in bytes: 3.7 KiB per round after the warm-up of 5,000."""


def soak(subject: Subject, strategy: Strategy, rounds: int, seed: int) -> Measurements:
    """Draft this many rounds, drawn from the seed. Raises Unsupported for a strategy that the backend does not allow,
    and CheckFailure, which names the round."""
    which = f"{rounds} in {strategy.value} with seed {seed}"
    fixture = soak_fixture(subject)
    try:
        candidate, reference = SoakDrafter.make(fixture, strategy), SoakDrafter.make(fixture, Strategy.EAGER)
    except StrategyError as error:
        raise Unsupported(str(error)) from error
    candidate.drafter.capture()
    every = soak_rounds(fixture, candidate.drafter.graphs.sizes, seed)
    warm_up = min(_WARM_UP, rounds // 2)
    counts = _run(which, candidate, reference, islice(every, warm_up))
    warm = memory.read(subject.device)
    counts += _run(which, candidate, reference, islice(every, rounds - warm_up))
    end = memory.read(subject.device)
    if grown := growth(warm, end):
        raise CheckFailure(
            contract=f"memory stays constant after {warm_up} rounds of {which}",
            expected=f"equal allocation on the device, and a resident set within {_RESIDENT_GROWTH >> 20} MiB",
            got=grown,
        )
    measured = {"resident_growth": (end.resident or 0) - (warm.resident or 0), "allocated": end.allocated or 0}
    return {name: float(count) for name, count in {**counts, **measured}.items()}


def growth(warm: MemoryReading, end: MemoryReading) -> str:
    """Describe what grew beyond its limit; empty if nothing did."""
    if warm.allocated != end.allocated:
        return f"{warm.allocated} bytes allocated, then {end.allocated}: something keeps tensors alive"
    grown = (end.resident or 0) - (warm.resident or 0)
    return f"a resident set {grown} bytes larger: something keeps host memory" * (grown > _RESIDENT_GROWTH)


def _run(
    which: str,
    candidate: SoakDrafter,
    reference: SoakDrafter,
    rounds: Iterator[tuple[ScheduledRound, VerifiedTokens]],
) -> Counter[str]:
    """Draft the rounds and count their events. Raises CheckFailure, which names the round."""
    counts: Counter[str] = Counter()
    for round_, verified in rounds:
        where = f"round {round_.index} of {which}"
        try:
            _draft(where, round_, verified, candidate, reference)
        except CheckFailure:
            raise
        except Exception as error:  # a backend can fail in any way; report the round with it
            got = f"{type(error).__name__}: {error}{error_location(error)}"
            raise CheckFailure(contract=f"{where} raises nothing", expected="drafts", got=got) from error
        counts.update(
            rounds=1,
            compared=int(round_.compared),
            joins=round_.joined,
            leaves=round_.left,
            limit_hits=round_.at_limit,
            tokens=sum(row.drafts for row in round_.rows),
        )
    return counts


def _draft(
    where: str, round_: ScheduledRound, verified: VerifiedTokens, candidate: SoakDrafter, reference: SoakDrafter
) -> None:
    if not round_.compared:
        candidate.draft(round_, verified)
        return
    for target, source in zip(reference.cache, candidate.cache, strict=True):
        target.copy_(source)
    found = _observed(candidate, candidate.draft(round_, verified))
    eager = _observed(reference, reference.draft(round_, verified))
    k, rows = candidate.drafter.num_speculative_tokens, round_.rows
    overflow = torch.zeros_like(eager["overflow flag"])
    overflow[: len(rows)] = torch.tensor([row.drafts < k for row in rows], device=overflow.device)
    counts = torch.tensor([row.drafts for row in rows], device=overflow.device)
    _expect_same(f"{where}, compared with eager", round_, found, eager)
    _expect_same(f"{where}, within the limits", round_, eager, {"token count": counts, "overflow flag": overflow})


def _observed(drafter: SoakDrafter, drafts: Drafts) -> dict[str, torch.Tensor]:
    """Return what a round leaves, by row of the batch or page of the cache."""
    drafted = drafts.tokens >= 0
    return {
        "token": drafts.tokens,
        "logit": torch.where(drafted[..., None], drafts.logits, 0.0),
        "token count": drafted.sum(1),
        "overflow flag": drafter.drafter.tables.overflow,
        "key cache": drafter.cache[0],
        "value cache": drafter.cache[1],
    }


def _expect_same(
    where: str, round_: ScheduledRound, found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]
) -> None:
    """Raise CheckFailure for the first element that differs in bits or is NaN; syncs with the device."""
    for what, tensor in wanted.items():
        differs = (bits(found[what]) != bits(tensor)) | tensor.isnan()
        if not differs.any():
            continue
        at = differs.nonzero()[0].tolist()
        row = at[0] if "cache" not in what else next((r for r, its in enumerate(round_.rows) if at[0] in its.pages), -1)
        request = round_.rows[row].request if 0 <= row < len(round_.rows) else "none"
        place = f"{what} {at}, row {row} (request {request})"
        values = (each[tuple(at)].item() for each in (tensor, found[what]))
        raise CheckFailure(contract=f"{where}: {place}", expected=str(next(values)), got=str(next(values)))

"""Rounds of a soak's schedule with a drafter whose metadata is validated."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from attn_backends import AttentionBackend
from builders.kernels.triton_runtime import torch_implementations
from spec_decode.drafter import Strategy
from spec_decode.testing.subject import Subject
from spec_decode.tools.metadata_validator import MetadataValidator
from spec_decode.tools.soak.fixture import SoakFixture
from spec_decode.tools.soak.schedule import Schedule

MAX_REQS, DRAFT_TOKENS = 8, 4


@dataclass(frozen=True, slots=True)
class ValidatedRounds:
    """What ran without a drift. validations: rounds validated; milliseconds: of one of them, on average."""

    strategy: str
    rounds: int
    validations: int
    joins: int
    leaves: int
    milliseconds: float

    def describe(self) -> str:
        """One line."""
        return (
            f"{self.rounds} rounds ({self.strategy}), {self.joins} joins, {self.leaves} leaves; {self.validations} "
            f"validations without a drift, {self.milliseconds:.1f} ms each"
        )


def validate_rounds(
    backend: AttentionBackend,
    device: torch.device,
    *,
    rounds: int = 100,
    every: int = 1,
    strategy: Strategy | None = None,
    page_size: int | None = None,
) -> ValidatedRounds:
    """Draft with a small random model while requests join and leave, and validate every N-th round.

    strategy: None takes the one with the least host work that the backend allows. page_size: None takes the kit's.
    Raises MetadataDrift for the first thing that is wrong, Unsupported where the backend refuses every spec of the kit
    or the page size, and whatever the drafter raises.
    """
    # On the CPU an interpreted kernel would take a second a round; the conformance checks cover the kernels.
    with torch.no_grad(), torch_implementations():
        fixture = SoakFixture.of(
            Subject(backend, device), max_reqs=MAX_REQS, num_speculative_tokens=DRAFT_TOKENS, page_size=page_size
        )
        candidate = fixture.drafter(strategy)
        validator = MetadataValidator(candidate.drafter, every=every)
        schedule = Schedule(fixture.limits, first=candidate.drafter.graphs.sizes, compare_every=max(2, rounds), seed=0)
        joins = leaves = 0
        for round_, verified in fixture.inputs(0).rounds(schedule, rounds):
            joins, leaves = joins + round_.joined, leaves + round_.left
            candidate.draft(round_, verified, validator.propose)
    strategy, validations = candidate.drafter.plan.strategy.value, validator.validations
    return ValidatedRounds(strategy, rounds, validations, joins, leaves, validator.milliseconds / max(1, validations))

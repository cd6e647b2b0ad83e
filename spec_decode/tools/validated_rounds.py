"""Rounds of the family soak with a drafter whose metadata is validated."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice

import torch

from attn_backends import AttentionBackend
from builders.kernels.triton_runtime import torch_implementations
from spec_decode.conformance.soak_rounds import SoakDrafter, soak_fixture, soak_rounds
from spec_decode.drafter import Strategy
from spec_decode.testing.subject import Subject
from spec_decode.tools.metadata_validator import MetadataValidator


@dataclass(frozen=True, slots=True)
class ValidatedRounds:
    """Rounds that ran without drift. validations: rounds validated; milliseconds: average per validation."""

    strategy: str
    rounds: int
    validations: int
    joins: int
    leaves: int
    milliseconds: float

    def describe(self) -> str:
        """Return one line."""
        return (
            f"{self.rounds} rounds ({self.strategy}), {self.joins} joins, {self.leaves} leaves; {self.validations} "
            f"validations without drift, {self.milliseconds:.1f} ms each"
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

    strategy: None for the allowed strategy with the least host work. page_size: None for the kit's. Raises
    MetadataDrift for the first mismatch, Unsupported if the backend rejects every spec of the kit or the page size, and
    any error of the drafter.
    """
    # On the CPU an interpreted kernel would take a second per round; the conformance checks cover the kernels.
    with torch.no_grad(), torch_implementations():
        fixture = soak_fixture(Subject(backend, device), page_size)
        candidate = SoakDrafter.make(fixture, strategy)
        validator = MetadataValidator(candidate.drafter, every=every)
        joins = leaves = 0
        for round_, verified in islice(soak_rounds(fixture, candidate.drafter.graphs.sizes, seed=0), rounds):
            joins, leaves = joins + round_.joined, leaves + round_.left
            candidate.draft(round_, verified, validator.propose)
    strategy, validations = candidate.drafter.plan.strategy.value, validator.validations
    return ValidatedRounds(strategy, rounds, validations, joins, leaves, validator.milliseconds / max(1, validations))

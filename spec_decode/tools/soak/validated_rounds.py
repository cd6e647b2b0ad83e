"""Rounds of a soak's schedule with a drafter whose metadata is validated."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from attn_backends import AttentionBackend
from builders.kernels.triton_runtime import torch_implementations
from spec_decode.drafter import Strategy
from spec_decode.testing.subject import Subject
from spec_decode.tools.metadata_validator import MetadataValidator
from spec_decode.tools.soak.inputs import CHUNK
from spec_decode.tools.soak.schedule import Schedule
from spec_decode.tools.soak.stage import Stage

MAX_REQS, STEPS = 8, 4


@dataclass(frozen=True, slots=True)
class ValidatedRounds:
    """What ran without a drift. validations: rounds validated; milliseconds: of one of them, on average."""

    backend: str
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
    seed: int = 0,
) -> ValidatedRounds:
    """Draft with a small random model while requests join and leave, and validate every N-th round.

    strategy: None takes the one with the least host work that the backend allows. page_size: None takes the kit's.
    Raises MetadataDrift for the first thing that is wrong, Unsupported where the backend refuses every spec of the kit
    or the page size, and whatever the drafter raises.
    """
    # On the CPU an interpreted kernel would take a second a round; the conformance checks cover the kernels.
    with torch.no_grad(), torch_implementations():
        stage = Stage.of(Subject(backend, device), max_reqs=MAX_REQS, steps=STEPS, page_size=page_size)
        side, inputs = stage.side(strategy), stage.inputs(seed)
        validator = MetadataValidator(side.drafter, every=every)
        schedule = Schedule(stage.setting, first=side.drafter.graphs.sizes, compare_every=max(2, rounds), seed=seed)
        joins = leaves = 0
        for index in range(rounds):
            if (place := index % CHUNK) == 0:
                played = [next(schedule) for _ in range(min(CHUNK, rounds - index))]
                inputs.load(played)
            round_ = played[place]
            joins, leaves = joins + round_.joined, leaves + round_.left
            side.draft(round_, inputs.of(place, len(round_.rows)), validator.propose)
    return ValidatedRounds(
        backend=backend.name,
        strategy=side.drafter.plan.strategy.value,
        rounds=rounds,
        validations=validator.validations,
        joins=joins,
        leaves=leaves,
        milliseconds=validator.milliseconds / max(1, validator.validations),
    )

"""Backends broken in one way each. The kit is good only if a named check kills every one of them."""

from tests.mutants import attention, builders, calls, claims, draft_shapes, drawn, edges, scales, state
from tests.mutants.mutant import Mutant, mutants_of

MUTANTS = tuple(mutant for module in (builders, attention, draft_shapes) for mutant in mutants_of(vars(module)))
BESIDE = tuple(mutant for module in (calls, claims, drawn, edges, scales, state) for mutant in mutants_of(vars(module)))
"""Mutants whose defect no one-layer drafter of attention at the usual sizes reaches."""
ALL_MUTANTS = (*MUTANTS, *BESIDE)


def mutant_named(name: str) -> Mutant:
    return next(mutant for mutant in ALL_MUTANTS if mutant.name == name)

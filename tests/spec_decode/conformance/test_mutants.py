"""The kit is tested with broken backends: each is killed by the check that names its defect."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attn_backends import get
from spec_decode.conformance import check as kit
from spec_decode.conformance import check_backend, iter_checks
from spec_decode.testing.outcome import Outcome
from tests.foreseen import Foreseen
from tests.mutants import ALL_MUTANTS, MUTANTS, ONE_PAGE_SIZE, Mutant, freeze
from tests.page_lists import PageLists

CPU = torch.device("cpu")
PLANS_AHEAD = "builder.plans_ahead_attend_right"
KILLED = {Outcome.FAIL, Outcome.ERROR}

BACKENDS = ("torch_reference", "triton_paged", "triton_mla", "sparse_swa_mla")
STEP_FIELDS = [(name, field) for name in BACKENDS for field in get(name).builder.step_fields]


def outcomes(backend: object, *checks: str) -> dict[str, set[Outcome]]:
    report = check_backend(backend, device=CPU, checks=checks)  # type: ignore[arg-type]
    found: dict[str, set[Outcome]] = {}
    for result in report.results:
        found.setdefault(result.check, set()).add(result.outcome)
    return found


def killed(mutant: Mutant) -> bool:
    with mutant.around(mutant.backend) as asked:
        return Outcome.FAIL in outcomes(asked, mutant.pattern)[mutant.killer]


@pytest.mark.parametrize("mutant", ALL_MUTANTS, ids=lambda mutant: mutant.name)
def test_mutant_fails_the_check_that_names_its_defect(mutant: Mutant) -> None:
    assert killed(mutant)


@pytest.mark.parametrize("pattern", sorted({mutant.pattern for mutant in ALL_MUTANTS if mutant.killer != PLANS_AHEAD}))
def test_killer_passes_on_the_reference(pattern: str) -> None:
    assert set().union(*outcomes(get("torch_reference"), pattern).values()) == {Outcome.PASS}


CHECKS = sorted({check.name for check in iter_checks("torch_reference", device=CPU)} | {PLANS_AHEAD})


@pytest.mark.parametrize("name", CHECKS)
def test_a_check_that_is_emptied_lets_a_mutant_through(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """So each check is the one that fails for some mutant; a new one brings its mutant."""
    emptied = [
        replace(definition, body=lambda subject, case: None) if definition.name == name else definition
        for definition in kit._definitions
    ]
    monkeypatch.setattr(kit, "_definitions", emptied)
    let_through = [mutant.name for mutant in ALL_MUTANTS if mutant.killer == name and not killed(mutant)]
    assert let_through, f"no mutant in tests/mutants.py has the killer {name}: nothing shows that it can fail. Add one."


def reasons(mutant: Mutant, check: str) -> list[str]:
    """What the cases of a check say that the mutant fails."""
    report = check_backend(mutant.backend, device=CPU, checks=[check])
    return [result.reason for result in report.results if result.outcome is Outcome.FAIL]


def test_a_right_page_list_passes_what_its_mutants_fail() -> None:
    check_backend(PageLists(), device=CPU, families=["contract", "builder"]).raise_if_failed()


def test_a_page_size_in_advance_is_seen_only_on_other_page_sizes() -> None:
    found = reasons(ONE_PAGE_SIZE, "builder.advance_means_a_rebuild[[]page_*")

    assert reasons(ONE_PAGE_SIZE, "builder.advance_means_a_rebuild[[]base-*") == []
    assert len(found) == 2 and all("field page_counts" in why for why in found)


@pytest.mark.parametrize("name", ["page_counts_only_grow", "tail_of_a_list_stays"])
def test_what_a_longer_batch_leaves_behind_is_told_with_that_batch(name: str) -> None:
    (mutant,) = (mutant for mutant in MUTANTS if mutant.name == name)
    found = reasons(mutant, "builder.advance_refreshes_another_batch[[]base-*")

    assert len(found) == 2 and all("P2, built on requests of [156" in why for why in found)


@pytest.mark.parametrize(("backend", "field"), STEP_FIELDS)
def test_removing_one_field_refresh_fails_the_advance_checks(backend: str, field: str) -> None:
    found = outcomes(freeze(backend, field), "builder.advance_*")

    assert Outcome.FAIL in found["builder.advance_means_a_rebuild"]
    assert Outcome.FAIL in found["builder.advance_refreshes_another_batch"]


@pytest.mark.parametrize(
    ("backend", "field"),
    [
        ("torch_reference", "kv_end"),
        ("torch_reference", "kv_start"),
        ("torch_reference", "slot_mapping"),
        ("triton_paged", "seq_lens"),
        ("triton_paged", "slot_mapping"),
    ],
)
def test_a_field_the_kernels_read_is_missed_by_attention_too(backend: str, field: str) -> None:
    found = outcomes(freeze(backend, field), "builder.advance_attends_right", "graph.loop_replays*")

    assert all(KILLED & kinds for kinds in found.values()), found


@pytest.mark.parametrize(
    ("backend", "field"),
    [("torch_reference", "kv_end"), ("triton_paged", "seq_lens"), ("triton_paged", "slot_mapping")],
)
def test_a_stale_field_shows_in_a_whole_round(backend: str, field: str) -> None:
    check = "drafter.steps_attend_to_the_logical_prefix"

    assert Outcome.FAIL in outcomes(freeze(backend, field), check)[check]


@pytest.mark.slow
def test_a_backend_that_plans_ahead_passes_the_kit() -> None:
    families = ["contract", "builder", "graph", "numerics"]
    check_backend(Foreseen(), device=CPU, families=families).raise_if_failed()
    found = outcomes(Foreseen(), "builder.plans_ahead_attend_right", "drafter.strategies_agree*k[47]-n3*")
    assert found == {name: {Outcome.PASS} for name in found} and len(found) == 2

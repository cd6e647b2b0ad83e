"""The kit is tested with broken backends: the check that names its defect kills each one."""

from __future__ import annotations

import re
from dataclasses import replace
from fnmatch import fnmatch
from unittest import mock

import pytest
import torch

from attn_backends import AttentionBackend, get
from attn_backends.registry import Backend
from spec_decode.conformance import check as kit
from spec_decode.conformance import check_backend, iter_checks, runner
from spec_decode.conformance.runner import CheckList, check_list, run, run_check
from spec_decode.testing.outcome import Outcome
from tests.foreseen import Foreseen
from tests.kit_rounds import is_drawn, runs_often
from tests.mutants import ALL_MUTANTS, mutant_named
from tests.mutants.draft_shapes import MergesTrees
from tests.mutants.mutant import Mutant, freeze
from tests.page_lists import PageLists

CPU = torch.device("cpu")
PLANS_AHEAD = "builder.plans_ahead_attend_right"
KILLED = {Outcome.FAIL, Outcome.ERROR}

BACKENDS = ("torch_reference", "triton_paged", "triton_mla", "sparse_swa_mla")
STEP_FIELDS = [(name, field) for name in BACKENDS for field in get(name).builder.step_fields]


def listed(backend: Backend | str, *patterns: str) -> CheckList:
    """What `check_backend` would run; of the other checks no case is made, and the report records no draws. Before its
    bracket a pattern is of names."""
    names = [pattern.partition("[")[0] for pattern in patterns]
    named = [d for d in kit._definitions if any(fnmatch(d.name, name) for name in names)]
    assert all(any(fnmatch(d.name, name) for d in named) for name in names), f"no check has one of these names: {names}"
    with mock.patch.object(kit, "_definitions", named), mock.patch.object(runner, "_drawn", lambda subject: None):
        return check_list(backend, device=CPU, checks=patterns)


def outcomes(backend: AttentionBackend, *patterns: str) -> dict[str, set[Outcome]]:
    found: dict[str, set[Outcome]] = {}
    for result in run(listed(backend, *patterns)).results:
        found.setdefault(result.check, set()).add(result.outcome)
    return found


def killed(mutant: Mutant) -> bool:
    """Whether its killer fails on one of its cases; those behind that one are not tried."""
    with mutant.around(mutant.backend) as backend:
        planned = listed(backend, mutant.pattern)
        assert {check.name for check in planned.checks} == {mutant.killer}
        return any(result.outcome is Outcome.FAIL for result in map(run_check, planned.checks, planned.report.results))


FIRST = {mutant.killer: mutant for mutant in reversed(ALL_MUTANTS)}
"""One mutant of each check; the others run with the long tests."""


@pytest.mark.parametrize(
    "mutant",
    [
        pytest.param(each, marks=() if FIRST[each.killer] is each else [pytest.mark.slow, pytest.mark.long])
        for each in ALL_MUTANTS
    ],
    ids=lambda mutant: mutant.name,
)
def test_mutant_fails_check_that_names_its_defect(mutant: Mutant) -> None:
    assert killed(mutant)


REFERENCE_CHECKS = [*iter_checks("torch_reference", device=CPU), *iter_checks("torch_state", device=CPU)]


@pytest.mark.parametrize("pattern", sorted({mutant.pattern for mutant in ALL_MUTANTS if mutant.killer != PLANS_AHEAD}))
def test_mutant_killers_run_on_the_reference(pattern: str) -> None:
    """Where each passes, so that what fails a mutant fails it for its defect; most drawn cases in slow tests."""
    checks = [check for check in REFERENCE_CHECKS if fnmatch(check.id, pattern)]
    assert checks and all(runs_often(check) or is_drawn(check) for check in checks)


def test_every_check_has_a_mutant() -> None:
    named = {mutant.killer for mutant in ALL_MUTANTS}
    assert {check.name for check in REFERENCE_CHECKS} | {PLANS_AHEAD} == named, "add the mutant in tests/mutants/"


def test_emptied_check_lets_its_mutants_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    mutant = mutant_named("stale_seq_lens")
    emptied = [replace(definition, body=lambda subject, case: None) for definition in kit._definitions]
    monkeypatch.setattr(kit, "_definitions", emptied)
    assert not killed(mutant)


def reasons(mutant: Mutant, check: str) -> list[str]:
    """What the cases of a check say that the mutant fails."""
    report = run(listed(mutant.backend, check))
    return [result.reason for result in report.results if result.outcome is Outcome.FAIL]


@pytest.mark.slow
def test_right_page_list_passes() -> None:
    check_backend(PageLists(), device=CPU, families=["contract", "builder"])


def test_right_tree_merge_passes() -> None:
    check_backend(MergesTrees(), device=CPU, checks=["*tree*[[]base-*"])


def test_fixed_page_size_fails_only_on_other_sizes() -> None:
    lister = mutant_named("pages_have_16_tokens")
    found = reasons(lister, "builder.advance_means_a_rebuild[[]page_*")

    assert reasons(lister, "builder.advance_means_a_rebuild[[]base-*") == []
    assert len(found) == 2 and all("field page_counts" in why for why in found)


@pytest.mark.parametrize("name", ["page_counts_only_grow", "tail_of_a_list_stays"])
def test_stale_rest_of_longer_batch_is_reported(name: str) -> None:
    found = reasons(mutant_named(name), "builder.advance_refreshes_another_batch[[]base-*")

    assert len(found) == 2 and all("P2, built for requests of [156" in why for why in found)


@pytest.mark.parametrize(("backend", "field"), STEP_FIELDS)
def test_removing_one_field_refresh_fails_advance_checks(backend: str, field: str) -> None:
    checks = ("builder.advance_means_a_rebuild", "builder.advance_refreshes_another_batch")
    found = outcomes(freeze(backend, field), *(f"{check}[[]*-decode]" for check in checks))

    assert all(Outcome.FAIL in found[check] for check in checks)


@pytest.mark.parametrize(
    ("backend", "field"),
    [("torch_reference", "kv_start"), ("triton_paged", "seq_lens"), ("triton_paged", "slot_mapping")],
)
def test_stale_kernel_field_fails_attention_and_round(backend: str, field: str) -> None:
    checks = ["builder.advance_attends_right", "graph.loop_replays*"]
    # The draft of a round has no window.
    checks += ["drafter.steps_attend_to_the_logical_prefix"] if field != "kv_start" else []
    found = outcomes(freeze(backend, field), *checks)

    assert len(found) == len(checks) and all(KILLED & kinds for kinds in found.values()), found


@pytest.mark.slow
def test_backend_planning_ahead_passes_the_kit() -> None:
    check_backend(Foreseen(), device=CPU, families=["contract", "builder", "graph"])
    check_backend(Foreseen(), device=CPU, checks=["numerics.*[[]base*"])
    found = outcomes(Foreseen(), "builder.plans_ahead_attend_right", "drafter.strategies_agree[[]k[47]-n3*")
    assert found == {name: {Outcome.PASS} for name in found} and len(found) == 2


def test_wrong_state_is_reported_with_its_worst_element() -> None:
    (why,) = reasons(mutant_named("keeps_states_by_row"), "state.rows_can_move[[]base]")
    assert re.search(r"within \S+; -?0\.\d+ at layer \d, query token \d of slot 4, head \d, column \d; got: 0, a", why)

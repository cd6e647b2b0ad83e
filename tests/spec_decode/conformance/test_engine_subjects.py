"""A subject can be an engine's own builder, even without an attention that reads its metadata."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attn_backends import get
from spec_decode.conformance.report import Report
from spec_decode.conformance.runner import check_list, run
from spec_decode.testing.outcome import Outcome
from spec_decode.testing.subject import Subject
from tests.mutants import mutant_named

SLOTS = Subject(get("torch_reference"), torch.device("cpu"), engine="engine 1.2", no_attention="it maps slots")
BY_FIELDS = ("builder.advance_refreshes_another_batch", "graph.replayed_advances_mean_a_rebuild")


def report_of(subject: Subject, *checks: str) -> Report:
    return run(check_list(subject, checks=[f"{check}[[]base-*" for check in checks]))


def mutant(name: str) -> Subject:
    return replace(SLOTS, backend=mutant_named(name).backend)


def test_report_names_engine_and_repro_command() -> None:
    report = report_of(SLOTS, "builder.build_leaves_the_batch_alone")

    assert report.engine == "engine 1.2"
    assert set(report.claims) == {"graph:capture", "graph:advance"}
    assert report.repro(report.results[0].check, "any").startswith(
        "attn-backends check --engine engine torch_reference --device cpu"
    )


@pytest.mark.parametrize("check", BY_FIELDS)
def test_fields_are_compared_without_attention(check: str) -> None:
    assert {result.outcome for result in report_of(SLOTS, check).results} == {Outcome.PASS}


@pytest.mark.parametrize("name", ["increments_its_own_contents", "unseen_after_five_advances"])
def test_stale_field_fails_without_attention(name: str) -> None:
    """And no such failure is a preview: an engine's builder was built for no version of the contract."""
    assert Outcome.FAIL in {result.outcome for result in report_of(mutant(name), *BY_FIELDS).results}


def test_engine_builder_has_no_previews() -> None:
    old = type("Old", (type(SLOTS.backend),), {"contract_version": (1, 0)})()
    planned = check_list(replace(SLOTS, backend=old), checks=["graph.replayed*"])

    assert [check.preview for check in planned.checks] == [""] * len(planned.checks)
    assert all(check.preview for check in check_list(old, device=SLOTS.device, checks=["graph.replayed*"]).checks)


def test_attention_check_is_unsupported_without_attention() -> None:
    (result,) = report_of(SLOTS, "builder.padding_stays_inert").results[:1]

    assert result.outcome is Outcome.UNSUPPORTED
    assert "it maps slots" in result.reason

"""An engine's builder under the contract: the right one passes, and the other's wrong update is named."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from spec_decode.conformance.report import Report, Result, repro_command
from spec_decode.testing.outcome import Outcome
from tests.examples.stranger import Stranger

EXAMPLE = Path(__file__).parents[2] / "examples" / "wrapped_engine"
_QUICK = "--family contract --family builder --family refusal --family poison --family graph"

pytestmark = pytest.mark.slow
"""Each installs the package and starts Python several times."""


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> tuple[Stranger, Path]:
    checkout = tmp_path_factory.mktemp("checkout") / "wrapped_engine"
    shutil.copytree(EXAMPLE, checkout)
    environment = Stranger.arrive(tmp_path_factory.mktemp("environment"))
    environment.must("pip install .", checkout)
    return environment, checkout


@pytest.fixture(scope="module")
def wrong_results(stranger: tuple[Stranger, Path]) -> dict[str, Result]:
    """What the kit says of the wrong update, by check and case, asked as a report says to."""
    environment, checkout = stranger
    repro = repro_command("engine_paged_drifting", "builder.advance_means_a_rebuild", "base-decode", device="cpu")
    single = "--only 'builder.advance_means_a_rebuild*base-single*'"
    assert "field kv_indptr" in environment.must(f"{repro} {single} --json lie.json", checkout, status=1)
    return {f"{r.check}[{r.case}]": r for r in Report.load(checkout / "lie.json").results}


def test_engine_builder_passes_checks(stranger: tuple[Stranger, Path]) -> None:
    environment, checkout = stranger
    environment.must(f"attn-backends check engine_paged {_QUICK} --json right.json", checkout)

    assert Report.load(checkout / "right.json").ok


def test_engine_builder_drafts_in_one_graph(stranger: tuple[Stranger, Path]) -> None:
    environment, checkout = stranger
    command = "attn-backends draft 'def read(path):' --backend engine_paged --strategy full_loop --max-tokens 4"

    assert "(engine_paged): advanced in the graph; the engine claims to" in environment.must(command, checkout)


def test_wrong_update_is_reported_with_field_and_step(wrong_results: dict[str, Result]) -> None:
    found = wrong_results["builder.advance_means_a_rebuild[base-decode]"]

    assert found.outcome is Outcome.FAIL
    assert re.search(r"step \d of P1: field kv_indptr matches the current batch; expected: .*; got: ", found.reason)


def test_wrong_update_passes_until_a_page_fills(wrong_results: dict[str, Result]) -> None:
    """The lie that a single short batch would not have shown."""
    assert wrong_results["builder.advance_means_a_rebuild[base-single]"].outcome is Outcome.PASS

import click
import pytest

from spec_decode.cli import strategy_comparison as comparison
from spec_decode.drafter import Strategy


@pytest.fixture
def short_demo(monkeypatch):
    monkeypatch.setattr(comparison, "PROMPTS", 2)
    monkeypatch.setattr(comparison, "NEW_TOKENS", 6)


def test_demo_fits_a_screen(pair, reports, short_demo, run):
    result = run("demo", "--device", "cpu", "--pair", pair)
    assert result.exit_code == 0, result.output
    assert len(result.stdout.splitlines()) <= 40
    for part in (
        "backends made for cpu: torch_reference",
        "not here: ",
        "\ncontinued\n",
        "strategy full_loop: ",
        "yes",
    ):
        assert part in result.stdout
    assert "every run agrees" in result.stdout


def test_demo_writes_the_page_of_the_matrix_and_names_it(pair, reports, short_demo, tmp_path, run, monkeypatch):
    opened = []
    monkeypatch.setattr(click, "launch", opened.append)
    result = run("demo", "--device", "cpu", "--pair", pair)
    page = tmp_path / "build" / "demo.html"
    assert str(page) in result.stdout and page.read_text().startswith("<!doctype html>")
    assert not opened


def test_demo_opens_the_page_where_there_is_a_desktop(pair, reports, short_demo, run, monkeypatch):
    opened = []
    monkeypatch.setattr(click, "launch", opened.append)
    monkeypatch.setattr("spec_decode.cli.demo._has_desktop", lambda console: True)
    run("demo", "--device", "cpu", "--pair", pair)
    assert opened == ["build/demo.html"]


def test_demo_refuses_a_page_that_cannot_be_written_before_it_drafts(pair, tmp_path, refused):
    (tmp_path / "build").write_text("")
    assert "writable" in refused("demo", "--device", "cpu", "--pair", pair)


def test_demo_shows_every_part_in_full_and_succeeds(pair, checks, short_demo, run):
    result = run("demo", "--full", "--device", "cpu", "--pair", pair)
    assert result.exit_code == 0, result.output
    for part in ("asked for:", "continued", "full_loop", "yes, 2 of 2", "not eager:", "verified 1/1"):
        assert part in result.output
    assert list(checks.calls[0][1]["families"]) == ["contract", "builder"]


def test_demo_drafts_with_every_draft_of_the_pair(latent_pair, checks, short_demo, run):
    result = run("demo", "--full", "--device", "cpu", "--pair", latent_pair)
    assert result.exit_code == 0, result.output
    first, latent = result.output.split("latent_draft [")
    assert "\ndraft [2/1 heads" in first and "window 24, sinks, mla]:" in latent
    table, explained = latent.split("3. Why")
    assert "torch_reference" in table and "triton_paged  " not in table and "NO:" not in table
    assert "torch_reference, draft" in explained and "torch_reference, latent_draft" in explained


def test_demo_prefers_reports_that_are_there(pair, reports, checks, short_demo, run):
    checks.calls.clear()
    result = run("demo", "--device", "cpu", "--pair", pair)
    assert result.exit_code == 0 and "of 1 reports" in result.output and not checks.calls


def test_demo_fails_if_one_strategy_differs(pair, checks, short_demo, monkeypatch, run):
    untampered = comparison.generate

    def tampered(models, backends, requests, count, strategy=None):
        outcome = untampered(models, backends, requests, count, strategy)
        if strategy is Strategy.FULL_LOOP:
            outcome.generations[0].token_ids[-1] ^= 1
        return outcome

    monkeypatch.setattr(comparison, "generate", tampered)
    result = run("demo", "--device", "cpu", "--pair", pair)
    assert result.exit_code == 1 and " NO " in result.output and "NOT EVERY RUN AGREES" in result.output
    assert "NO: 1 of 2 differ" in run("demo", "--full", "--device", "cpu", "--pair", pair).output


def test_demo_shows_why_a_strategy_cannot_be_run(pair, checks, short_demo, run, rebuilt):
    result = run("demo", "--full", "--device", "cpu", "--pair", pair)
    assert result.exit_code == 0 and "cannot run" in result.output and "for the test" in result.output

from pathlib import Path
from types import SimpleNamespace

import click
import pytest
import torch

from attn_backends import registry
from spec_decode.cli import demo
from spec_decode.cli import strategy_comparison as comparison
from spec_decode.drafter import Strategy
from spec_decode.llm.backends import backends_named
from spec_decode.llm.pair import load_byte_pair
from tests.factories import make_request
from tests.spec_decode.cli.conftest import RebuildBackend, invoke, stand_in_kit


def shorten(monkeypatch):
    monkeypatch.setattr(comparison, "PROMPTS", 2)
    monkeypatch.setattr(comparison, "PROMPT_BYTES", 32)
    monkeypatch.setattr(comparison, "NEW_TOKENS", 4)
    monkeypatch.setattr(comparison, "DRAFT_TOKENS", 2)


@pytest.fixture(scope="module")
def shown(pair, tmp_path_factory):
    """The demo beside a report, once: what it printed, the page it wrote, what it opened and the checks it ran."""
    folder, opened = tmp_path_factory.mktemp("demo"), []
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.chdir(folder)
        shorten(monkeypatch)
        kit = stand_in_kit(monkeypatch)
        invoke("check", "torch_reference", "--device", "cpu", "--json", folder / "reports" / "cpu")
        kit.calls.clear()
        monkeypatch.setattr(click, "launch", opened.append)
        result = invoke("demo", "--device", "cpu", "--pair", pair)
    page = folder / "build" / "demo.html"
    return SimpleNamespace(result=result, page=page, opened=opened, checks=kit.calls)


@pytest.fixture(scope="module")
def shown_in_full(latent_pair, tmp_path_factory):
    """`demo --full` without reports, once, with two drafts and a backend that cannot be run in every strategy."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.chdir(tmp_path_factory.mktemp("demo"))
        shorten(monkeypatch)
        kit = stand_in_kit(monkeypatch)
        registry.register(RebuildBackend)
        monkeypatch.setattr(registry, "names", lambda: ["torch_reference", "triton_paged", "rebuilt"])
        try:
            result = invoke("demo", "--full", "--device", "cpu", "--pair", latent_pair)
        finally:
            registry.unregister("rebuilt")
    return SimpleNamespace(result=result, checks=kit.calls)


def test_demo_compares_block_draft_in_its_strategies(block_pair):
    pair = load_byte_pair(Path(block_pair), torch.float32, torch.device("cpu"), draft="block_draft")
    backends = backends_named(pair, comparison.CONFIG, "torch_reference")
    progress: list[str] = []
    found = comparison.compare(pair, backends, [make_request(prompt=[0], max_tokens=4)], progress.append)
    assert not found.differs
    assert [row.strategy for row in found.rows if row.run is None] == [Strategy.DEVICE_LOOP, Strategy.PIECEWISE]
    assert [run.split(": ")[1] for run in progress] == ["plain decoding", "full_loop", "per_step", "eager"]
    assert "not device_loop: this draft proposes all its tokens in one step" in "\n".join(found.chosen.explain())


def test_demo_fits_a_screen_and_writes_page(shown):
    output = shown.result.stdout
    assert shown.result.exit_code == 0 and len(output.splitlines()) <= 40, shown.result.output
    for part in (
        "backends made for cpu: torch_reference",
        "not available here: ",
        "\ncontinued\n",
        "strategy full_loop: ",
        "every run matches the tokens of eager drafting",
        "\npiecewise cannot run: every group's attention can be captured, so there is nothing to split the graph "
        "around\n",
        "shows 1 reports",
        str(shown.page),
    ):
        assert part in output
    assert shown.page.read_text().startswith("<!doctype html>") and not shown.checks
    assert not shown.opened, "there is no desktop"


def test_reason_names_drafts_it_applies_to():
    def compared(**reasons):
        return [SimpleNamespace(chosen=SimpleNamespace(unsupported={Strategy(n): r for n, r in reasons.items()}))]

    found = {"a": compared(piecewise="why", device_loop="once"), "b": compared(piecewise="why")}
    assert comparison.reasons(found) == ["piecewise cannot run: why", "device_loop cannot run for a: once"]


def test_demo_opens_page_on_desktop(monkeypatch):
    opened = []
    monkeypatch.setattr(click, "launch", opened.append)
    monkeypatch.setattr(demo, "_has_desktop", lambda console: True)
    demo._conclude(demo.stdout(), True, True, "build/demo.html")
    assert opened == ["build/demo.html"]


def test_demo_rejects_unwritable_page_before_drafting(pair, tmp_path, refused):
    (tmp_path / "build").write_text("")
    assert "cannot be written" in refused("demo", "--device", "cpu", "--pair", pair)


@pytest.mark.slow
def test_full_demo_shows_every_part(shown_in_full):
    assert shown_in_full.result.exit_code == 0, shown_in_full.result.output
    parts = ("requested:", "continued", "full_loop", "yes, 2 of 2", "not eager:", "verified 1/1")
    for part in (*parts, "cannot run", "for the test"):
        assert part in shown_in_full.result.output
    assert list(shown_in_full.checks[0][1]["families"]) == ["contract", "builder"], "the quick ones, without reports"


@pytest.mark.slow
def test_demo_uses_every_draft_of_the_pair(shown_in_full):
    first, latent = shown_in_full.result.output.split("latent_draft [")
    assert "\ndraft [2/1 heads" in first and "window 24, sinks, mla]:" in latent
    table, explained = latent.split("3. Why")
    assert "torch_reference" in table and "triton_paged  " not in table and "NO:" not in table
    assert "torch_reference, draft" in explained and "torch_reference, latent_draft" in explained


def test_demo_fails_if_one_strategy_differs(pair, checks, monkeypatch, run):
    shorten(monkeypatch)
    untampered, outcomes = comparison.generate, {}

    def tampered(models, backends, requests, config):
        strategy = config.drafter and config.drafter.strategy
        if strategy not in outcomes:
            outcomes[strategy] = untampered(models, backends, requests, config)
            outcomes[strategy].generations[0].token_ids[-1] ^= strategy is Strategy.FULL_LOOP
        return outcomes[strategy]

    monkeypatch.setattr(registry, "names", lambda: ["torch_reference"])
    monkeypatch.setattr(comparison, "generate", tampered)
    for full, says in (([], (" NO ", "NOT EVERY RUN AGREES")), (["--full"], ("NO: 1 of 2 differ",))):
        result = run("demo", *full, "--device", "cpu", "--pair", pair)
        assert result.exit_code == 1 and all(part in result.output for part in says), result.output

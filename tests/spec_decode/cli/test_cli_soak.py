import json
import sys
from types import SimpleNamespace

import msgspec
import pytest

import spec_decode.tools.soak
from spec_decode.testing.outcome import Outcome
from spec_decode.tools.soak import SoakReport
from tests.mutants import MUTANTS

SHORT = ("--rounds", 22, "--max-reqs", 2, "-k", 2, "--device", "cpu")


@pytest.fixture
def stale(plug_in):
    backend = next(mutant.backend for mutant in MUTANTS if mutant.name == "stale_seq_lens")
    plug_in(backend.name, lambda: backend)
    return backend.name


@pytest.fixture
def interrupted(monkeypatch):
    """A stand-in for the soak, which is interrupted as soon as it begins; holds how it was asked."""
    calls = []

    def soak(names, **asked):
        calls.append(names)
        raise KeyboardInterrupt

    options = spec_decode.tools.soak.Options
    monkeypatch.setitem(sys.modules, "spec_decode.tools.soak", SimpleNamespace(soak=soak, Options=options))
    return calls


def test_soak_has_help(run):
    result = run("soak", "--help")
    assert result.exit_code == 0 and "--device" in result.output and "20000" in result.output


def test_a_soak_prints_a_line_a_backend_and_writes_one_report(tmp_path, run):
    result = run("soak", "torch_reference", "triton_paged", *SHORT, "--json", "out/soak.json")
    assert result.exit_code == 0, result.output
    assert [line.split(",")[0] for line in result.stdout.splitlines()] == [
        "torch_reference: pass",
        "triton_paged: pass",
    ]

    report = msgspec.json.decode((tmp_path / "out" / "soak.json").read_bytes(), type=SoakReport)
    assert report.schema == "attn-soak/4" and report.env.python and report.ok
    assert [found.backend for found in report.results] == ["torch_reference", "triton_paged"]
    assert report.command.startswith("attn-backends soak torch_reference triton_paged --rounds 22 --max-reqs 2 -k 2")


def test_a_difference_is_printed_with_its_place_and_the_command_that_repeats_it(stale, tmp_path, run):
    result = run("soak", stale, *SHORT, "--json", "soak.json")
    assert result.exit_code == 1
    repro = f"attn-backends soak {stale} --rounds 22 --max-reqs 2 -k 2 --compare-every 10 --seed 0 --device cpu"
    assert f"{stale}: fail after" in result.output and f"\n    {repro}\n" in result.output

    found = json.loads((tmp_path / "soak.json").read_text())["results"][0]
    assert found["failure"]["row"] is not None and found["repro"] == repro
    repeated = run(*repro.split()[1:], "--json", "-")
    assert json.loads(repeated.stdout)["results"][0]["failure"] == found["failure"]


def test_one_failure_costs_the_others_nothing(stale, plug_in, run):
    plug_in("broken", "no_such_module:Backend")
    result = run("soak", stale, "broken", "torch_reference", *SHORT, "--json", "-")
    assert result.exit_code == 1
    found = json.loads(result.stdout)["results"]
    assert [each["outcome"] for each in found] == [Outcome.FAIL, Outcome.UNAVAILABLE, Outcome.PASS]


def test_an_interrupt_leaves_no_report(interrupted, tmp_path, run):
    result = run("soak", "torch_reference", *SHORT, "--json", tmp_path / "soak.json")
    assert result.exit_code == 130 and "no report" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_available_names_every_backend_made_for_the_device(interrupted, run):
    run("soak", "available", *SHORT)
    assert "torch_reference" in interrupted[0] and "flash_attn3" not in interrupted[0]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("nonesuch",), "torch_reference"),
        (("torch_reference", "--rounds", 3), "at least 42 rounds, got 3"),
        (("torch_reference", "--max-reqs", 0), "1 to 256 requests"),
        (("torch_reference", "-k", 0), "at least 1 token"),
        (("torch_reference", "--seed", -1), "seed must be"),
        (("torch_reference", "--json", "."), "is a folder"),
        (("torch_reference", "--device", "tpu"), "cpu, cuda or cuda:N"),
    ],
)
def test_bad_options_are_refused_before_anything_runs(words, says, interrupted, refused):
    assert says in refused("soak", "--device", "cpu", *words)
    assert not interrupted


def test_more_drafts_than_a_request_has_room_for_are_refused(refused):
    assert "Lower K" in refused("soak", "torch_reference", "-k", 64, "--device", "cpu")

import json
import sys
from types import SimpleNamespace

import pytest

from spec_decode.cli.bench import _short
from spec_decode.tools.timing_limit import TimingLimit


@pytest.fixture
def timings(monkeypatch):
    """A stand-in for the bench: `calls` are how it was asked, the rest is what it finds."""
    fake = SimpleNamespace(calls=[], missing=[], stopped=[])

    def timed(*, device, cases, on_row, command):
        fake.calls.append((cases, command))
        row = {"case": "round", "host_us": {"p20": 1.0, "p50": 12.3456, "p80": 20.0}, "floor_us": None}
        row["missing"] = fake.missing
        on_row(row)
        return SimpleNamespace(rows=[row], missing=fake.missing, stopped=fake.stopped)

    module = SimpleNamespace(run=timed, CASES={"round": "one round", "step": "one step"})
    monkeypatch.setitem(sys.modules, "spec_decode.tools.bench", module)
    return fake


def test_bench_prints_a_table_and_writes_rows(timings, tmp_path, run):
    result = run("bench", "round", "--device", "cpu", "--json", "out/rows.json")
    assert result.exit_code == 0 and "12.35" in result.output
    [row] = json.loads((tmp_path / "out" / "rows.json").read_text())
    assert (row["case"], row["host_us"]["p50"]) == ("round", 12.3456)
    assert timings.calls == [(("round",), "attn-backends bench round --device cpu")]


def test_bench_runs_in_as_many_processes_as_asked_for(timings, monkeypatch, run):
    seen = []

    def in_processes(count, **how):
        seen.append(count)
        return timings_of(**how)

    timings_of = sys.modules["spec_decode.tools.bench"].run
    module = SimpleNamespace(run_in_processes=in_processes)
    monkeypatch.setitem(sys.modules, "spec_decode.tools.bench.processes", module)
    assert run("bench", "round", "--device", "cpu", "--processes", "2").exit_code == 0
    assert seen == [2] and timings.calls == [(("round",), "attn-backends bench round --device cpu --processes 2")]


def test_bench_shows_each_limit_with_its_verdict():
    limits = [TimingLimit("host_us", 80.0, met=True)]
    shown = _short({"case": "round", "peer": True, "limits": limits, "env": {}, "floor_counts": "the weights"})
    assert (shown["limits"], shown["met"], shown["peer"]) == ("host_us <= 80", True, True) and {
        "env",
        "floor_counts",
    }.isdisjoint(shown)


def test_bench_shows_no_column_that_nothing_was_measured_for(timings, run):
    output = run("bench", "--device", "cpu").output
    assert "host us" in output and "floor us" not in output


def test_bench_says_below_its_table_what_has_no_row(timings, tmp_path, run):
    timings.missing += ["step: flashinfer is not installed"]
    result = run("bench", "--device", "cpu", "--json", "rows.json")
    assert result.exit_code == 0
    assert result.output.splitlines()[-1] == "not timed: step: flashinfer is not installed"
    assert json.loads((tmp_path / "rows.json").read_text())[0]["missing"] == timings.missing


def test_bench_ends_with_1_when_something_began_and_failed(timings, tmp_path, run):
    timings.stopped += ["step: stopped by RuntimeError: no memory"]
    assert run("bench", "--device", "cpu", "--json", "rows.json").exit_code == 1
    assert (tmp_path / "rows.json").exists()


def test_bench_lists_its_cases(timings, run):
    assert "one step" in run("bench", "--list").output and not timings.calls


def test_bench_lists_its_suites(run):
    assert "all of advance, step" in run("bench", "--list").output


def test_bench_refuses_an_unknown_case(timings, refused):
    assert "round, step" in refused("bench", "nonesuch", "--device", "cpu")


@pytest.mark.parametrize("case", ["advance", "step", "sparse-decode", "mla-decode", "paged-decode"])
def test_bench_refuses_to_time_a_gpu_on_a_cpu(case, refused):
    line = refused("bench", case, "--device", "cpu")
    assert f"the cases {case} time a CUDA device and this run is on cpu" in line


def test_a_bench_that_is_cut_off_leaves_the_rows_it_has(timings, tmp_path, run, monkeypatch):
    from spec_decode.cli import bench

    def cut_off(*, on_row, **_):
        on_row({"case": "round"})
        raise KeyboardInterrupt

    monkeypatch.setattr(bench, "_SECONDS_BETWEEN_WRITES", 0.0)
    monkeypatch.setattr(sys.modules["spec_decode.tools.bench"], "run", cut_off)
    run("bench", "--device", "cpu", "--json", "rows.json")
    assert json.loads((tmp_path / "rows.json").read_text()) == [{"case": "round"}]

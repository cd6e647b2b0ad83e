import pytest

from benchmarks import Bench, command
from benchmarks.command import _short
from spec_decode.cli import checkout
from spec_decode.files import read_json
from spec_decode.tools.timing_limit import TimingLimit
from tests.factories import CPU


class Timings:
    """A stand-in for the bench: `calls` are how it was asked, the rest is what it finds."""

    def __init__(self):
        self.calls, self.missing, self.stopped, self.env, self.floor = [], [], [], {}, None

    def __call__(self, *, device, cases, on_row, command):
        self.calls.append((cases, command))
        bench = Bench(CPU, None, self.env, missing=self.missing, stopped=self.stopped)
        bench.rows.append(
            {
                "case": "round",
                "backend": "k",
                "host_us": {"p20": 1.0, "p50": 12.3456, "p80": 20.0},
                "floor_us": self.floor,
            }
        )
        on_row(bench)
        return bench


@pytest.fixture
def timings(monkeypatch):
    fake = Timings()
    monkeypatch.setattr(command, "run", fake)
    monkeypatch.setattr(command, "CASES", {"round": "one round", "step": "one step"})
    return fake


@pytest.mark.parametrize("words", [(), ("--processes", "2")])
def test_bench_prints_table_and_writes_rows(timings, tmp_path, monkeypatch, run, words):
    counts = []
    monkeypatch.setattr(command, "run_in_processes", lambda count, **how: (counts.append(count), timings(**how))[1])
    result = run("bench", "round", "--device", "cpu", "--json", "out/rows.json", *words)
    assert result.exit_code == 0 and "12.35" in result.output
    assert "host us" in result.output and "floor us" not in result.output
    [row] = read_json(tmp_path / "out" / "rows.json")["rows"]
    assert (row["case"], row["host_us"]) == ("round", [1.0, 12.346, 20.0])
    assert counts == [int(count) for count in words[1:]]
    assert timings.calls == [(("round",), " ".join(("attn-backends bench round --device cpu", *words)))]


def test_floor_is_printed_with_the_rate_behind_it(timings, run):
    timings.env, said = {"copy_bytes_per_us": 2_900_000}, "at the 2.90 TB/s that a copy read and wrote together"
    assert said not in " ".join(run("bench", "--device", "cpu").output.split())
    timings.floor = 7.0
    assert said in " ".join(run("bench", "--device", "cpu").output.split())


def test_bench_notes_missing_rows_and_fails_for_stopped(timings, tmp_path, run):
    timings.missing += ["step: flashinfer is not installed"]
    result = run("bench", "--device", "cpu", "--json", "rows.json")
    assert result.exit_code == 0
    assert result.output.splitlines()[-1] == "not timed: step: flashinfer is not installed"
    assert read_json(tmp_path / "rows.json")["missing"] == timings.missing
    timings.stopped += ["step: stopped by RuntimeError: no memory"]
    assert run("bench", "--device", "cpu", "--json", "again.json").exit_code == 1
    assert (tmp_path / "again.json").exists()


def test_bench_lists_cases_and_shows_help(run):
    listed, usage = run("bench", "--list").output, run("bench", "--help").output
    assert "all of advance, step" in listed and all(case in listed for case in command.CASES)
    assert usage.startswith("Usage: main bench") and "--processes" in usage


def test_bench_rejects_unknown_cases_and_options(timings, refused, run):
    assert "round, step" in refused("bench", "nonesuch", "--device", "cpu")
    assert "No such option" in run("bench", "--nonesuch").stderr
    for more in (["step"], ["--json", "rows.json"], ["--processes", "2"]):
        assert "Remove the cases, --json and --processes." in refused("bench", "--list", *more)


def test_bench_shows_each_limit_and_if_met():
    limits = [TimingLimit("host_us", 80.0, met=True)]
    shown = _short({"case": "round", "peer": True, "limits": limits, "floor_counts": "the weights"})
    assert (shown["limits"], shown["met"], shown["peer"]) == ("host_us <= 80", True, True)
    assert "floor_counts" not in shown


@pytest.mark.parametrize("case", ["advance", "step", "sparse-decode", "mla-decode", "paged-decode"])
def test_bench_refuses_to_time_gpu_on_cpu(case, refused):
    line = refused("bench", case, "--device", "cpu")
    assert f"the cases {case} time a CUDA device, but this run is on cpu" in line


def test_interrupted_bench_keeps_rows_and_notes_it(timings, tmp_path, run, monkeypatch):
    def cut_off(**how):
        timings(**how)
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "_SECONDS_BETWEEN_WRITES", 0.0)
    monkeypatch.setattr(command, "run", cut_off)
    run("bench", "--device", "cpu", "--json", "rows.json")
    report = read_json(tmp_path / "rows.json")
    assert [row["case"] for row in report["rows"]] == ["round"]
    assert report["missing"][-1] == "all after round: cut off"


def test_bench_without_checkout_names_benchmarks_folder(refused, monkeypatch, tmp_path):
    monkeypatch.setattr(checkout, "_ROOT", tmp_path)
    assert "the benchmarks are not in the wheel, only in benchmarks/ of the repository" in refused("bench", "round")

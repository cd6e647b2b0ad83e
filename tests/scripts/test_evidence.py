"""The script that makes all evidence: reports in place, timings undisturbed, failures named."""

import json
import os
from dataclasses import replace
from itertools import pairwise

import msgspec
import pytest
import torch

from scripts import evidence
from scripts.evidence import Evidence, Step
from scripts.on_gpus import cores_of, run_on_gpus
from spec_decode.environment import environment
from spec_decode.files import report_bytes
from spec_decode.source_digests import SourceRecord

RECORD = """
import json, os, sys, time
began = time.time()
time.sleep({seconds})
cores = sorted(os.sched_getaffinity(0))
row = dict(gpu=os.environ["CUDA_VISIBLE_DEVICES"], began=began, ended=time.time(), cores=cores)
open(sys.argv[-1], "w").write(json.dumps(row))
print("said")
sys.exit({status})
"""


def step(report, *, seconds=0.1, status=0):
    return Step(report, ("-c", RECORD.format(seconds=seconds, status=status)))


def reports_in(folder):
    return {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}


def run_steps(folder, lone, shared, gpus=(0, 1), seconds=None):
    run = Evidence(gpus=gpus, lone=lone, shared=shared, into=folder, seconds=seconds)
    run.run()
    return run, reports_in(folder)


def test_every_step_leaves_report_and_no_log(tmp_path):
    run, reports = run_steps(tmp_path, [step("a")], [step("b"), step("c")])

    assert reports.keys() == {"a", "b", "c"} and not run.failed
    assert not list(tmp_path.glob("*.log")) and not list(tmp_path.glob(".*"))


def one_after_another(rows):
    rows = sorted(rows, key=lambda row: row["began"])
    return all(row["ended"] <= after["began"] for row, after in pairwise(rows))


def test_shared_steps_share_one_gpu_and_come_first(tmp_path):
    lone, shared = [[step(f"{kind}{i}", seconds=0.3) for i in range(4)] for kind in "ls"]
    _, reports = run_steps(tmp_path, lone, shared)

    together = [reports.pop(each.report) for each in shared]
    (gpu,) = {row["gpu"] for row in together}
    last = max(row["ended"] for row in together)
    assert max(row["began"] for row in together) < min(row["ended"] for row in together)
    assert all(row["gpu"] != gpu or row["began"] >= last for row in reports.values())


def test_lone_step_has_its_gpu_alone(tmp_path):
    _, reports = run_steps(tmp_path, [step(f"t{i}", seconds=0.5) for i in range(4)], [])

    by_gpu = [[row for row in reports.values() if row["gpu"] == gpu] for gpu in "01"]
    # On a busy machine, one GPU's steps can take so long that the other gets three.
    assert sum(map(len, by_gpu)) == 4 and all(by_gpu) and all(map(one_after_another, by_gpu))


@pytest.mark.parametrize(
    ("cores", "gpus", "expected"),
    [
        ((3, 4, 5, 6, 9), (0, 1), {0: [3, 4], 1: [5, 6]}),
        ((3, 4), (1,), {1: [3, 4]}),
        ((3,), (0, 1), {0: [3], 1: [3]}),
    ],
)
def test_cores_are_divided_among_gpus(cores, gpus, expected, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(cores))
    assert {gpu: cores_of([gpu], gpus) for gpu in gpus} == expected
    assert cores_of(gpus, gpus) == sorted({core for of_gpu in expected.values() for core in of_gpu})


def test_a_step_runs_on_its_gpus_cores(tmp_path):
    own = sorted(os.sched_getaffinity(0))
    _, reports = run_steps(tmp_path, [step("a", seconds=0.5), step("b", seconds=0.5)], [])
    found = {int(row["gpu"]): row["cores"] for row in reports.values()}
    assert found == {gpu: cores_of([gpu], (0, 1)) for gpu in (0, 1)}
    assert sorted(os.sched_getaffinity(0)) == own


def test_step_too_long_for_time_is_skipped(tmp_path):
    long = replace(step("long"), seconds=100.0)
    run, reports = run_steps(tmp_path, [long], [replace(step("short"), seconds=1.0)], seconds=60.0)

    assert reports.keys() == {"short"} and run.skipped == ["long"] and not run.failed


def test_step_over_time_is_killed_keeping_old_report(tmp_path):
    (tmp_path / "slow.json").write_text('{"old": true}')
    child = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1], *sys.argv[2:]])"
    slow = Step("slow", ("-c", child, RECORD.format(seconds=600, status=0)), seconds=0.0)
    run, reports = run_steps(tmp_path, [], [slow], seconds=0.5)

    assert run.failed == ["slow"] and reports == {"slow": {"old": True}}


@pytest.mark.parametrize("end", ["time.sleep(600)", "os.abort()"], ids=["by the time", "by itself"])
def test_partial_report_does_not_replace_old_one(tmp_path, end):
    (tmp_path / "slow.json").write_text('{"old": true}')
    writes = f"import os, sys, time; open(sys.argv[-1], 'w').write('{{\"part\": true}}'); {end}"
    run, reports = run_steps(tmp_path, [Step("slow", ("-c", writes), seconds=0.0)], [], seconds=2.0)

    assert run.failed == ["slow"] and reports == {"slow": {"old": True}}


def test_background_processes_end_with_their_command():
    read, write = os.pipe()
    with open(write, "w") as output:
        assert run_on_gpus(["sh", "-c", "(sleep 5; echo late) &"], [0], output, None, among=[0]) == 0
    # Ends when nobody is left who could write.
    with open(read) as file:
        assert file.read() == ""


def test_failed_step_keeps_its_report_and_log(tmp_path):
    run, reports = run_steps(tmp_path, [], [step("bad", status=1), step("good")])

    assert run.failed == ["bad"] and reports.keys() == {"bad", "good"}
    assert (tmp_path / "bad.log").read_text() == "said\n"


@pytest.mark.parametrize("dirty", [True, None])
def test_dirty_or_unknown_checkout_is_rejected(tmp_path, monkeypatch, capsys, dirty):
    other = replace_dirty(dirty)
    monkeypatch.setattr(evidence, "environment", lambda device: other)
    monkeypatch.setattr("sys.argv", ["evidence.py", "--into", str(tmp_path / "reports")])

    with pytest.raises(SystemExit) as stopped:
        evidence.main()

    assert stopped.value.code == 2 and not (tmp_path / "reports").exists()
    message = " ".join(capsys.readouterr().err.split())
    assert "evidence must come from a commit; this checkout has changes, or git cannot tell. Commit" in message


def replace_dirty(dirty):
    return msgspec.structs.replace(environment(torch.device("cpu")), dirty=dirty)


@pytest.fixture
def run_script(tmp_path, monkeypatch):
    """Runs the script with more arguments, on a clean checkout of a machine with two GPUs; what it made."""
    clean = replace_dirty(False)
    monkeypatch.setattr(evidence, "environment", lambda device: clean)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(evidence, "lone_steps", lambda: [step("memcheck"), step("bench-a")])
    monkeypatch.setattr(evidence, "shared_steps", lambda *names: [step("check-a"), step("soak-a")])

    def run(*arguments):
        monkeypatch.setattr("sys.argv", ["evidence.py", "--into", str(tmp_path), *arguments])
        evidence.main()
        return reports_in(tmp_path)

    return run


def test_only_requested_reports_are_written(run_script):
    assert run_script("--only", "check-*").keys() == {"check-a"}


def test_visible_gpu_name_is_passed_to_step(run_script, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,GPU-7")
    assert {row["gpu"] for row in run_script("--only", "memcheck", "--only", "bench-a").values()} == {"5", "GPU-7"}


def test_pattern_matching_no_report_is_rejected(run_script, capsys, tmp_path):
    with pytest.raises(SystemExit):
        run_script("--only", "check-*", "--only", "chek-*")
    message = "--only must match one of check-a, soak-a, memcheck, bench-a, got chek-*."
    assert message in capsys.readouterr().err and not reports_in(tmp_path)


def test_every_backend_is_checked_and_soaked_once():
    backends = ["one", "two"]
    steps = [*evidence.lone_steps(), *evidence.shared_steps(backends, ["state"])]
    reports = [each.report for each in steps]
    assert "check-state" in reports and "check-state-soak" not in reports

    assert len(set(reports)) == len(reports)
    assert {"check-one", "check-two", "check-one-soak", "check-two-soak"} <= set(reports)


def test_only_stale_reports_are_renewed(tmp_path, monkeypatch):
    fresh = {"schema": "attn-soak/4", "sources": msgspec.to_builtins(SourceRecord.of({"": ["builders.errors"]}))}
    (tmp_path / "fresh.json").write_bytes(report_bytes(fresh))
    (tmp_path / "old.json").write_bytes(report_bytes({**fresh, "sources": {"modules": {"builders": {"errors": "0"}}}}))
    (tmp_path / "cut.json").write_text('{"schema')
    (tmp_path / "edited.json").write_bytes(report_bytes(fresh).replace(b"soak", b"loaf"))
    names = ("fresh", "old", "cut", "edited", "missing")
    stale = [name for name in names if evidence.is_stale(tmp_path / f"{name}.json")]

    assert stale == ["old", "cut", "edited", "missing"]


@pytest.mark.parametrize(("device", "folder"), [("NVIDIA H200", "h200"), ("NVIDIA H100 80GB HBM3", "h100")])
def test_the_device_chooses_the_folder(device, folder):
    assert evidence.folder_of(device) == evidence.ROOT / "reports" / folder

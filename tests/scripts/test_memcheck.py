"""The sanitizer's run: what is watched, under which allocator, and when it has finished; the engines, on the CPU."""

import json
import os
import subprocess
import sys
import time
from collections import Counter
from functools import partial
from inspect import signature
from types import SimpleNamespace

import pytest
import torch

from scripts import memcheck
from scripts.memcheck import NO_CACHING, Target
from spec_decode.drafter import GraphMode
from spec_decode.graphs import cuda

SANITIZER = """#!{python}
import os, subprocess, sys
log = sys.argv[sys.argv.index("--log-file") + 1]
command = sys.argv[sys.argv.index("--log-file") + 2:]
ended = subprocess.run(command).returncode
open(log, "w").write({says!r})
sys.exit(ended)
"""


@pytest.fixture
def sanitizer(tmp_path, monkeypatch):
    """A stand-in for compute-sanitizer that runs the command and says what it is told to."""

    def install(says="========= ERROR SUMMARY: 0 errors"):
        path = tmp_path / "compute-sanitizer"
        path.write_text(SANITIZER.format(python=sys.executable, says=says))
        path.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")

    return install


def target(code, *, caching=False, checks=False):
    return Target("t", ("-c", code), caching, checks)


def test_what_is_launched_directly_is_watched_without_a_caching_allocator():
    found = {target.name: target for target in memcheck.targets(["k"], [])}
    assert not found["k, uncaptured"].caching and found["k, captured"].caching
    assert "poison.*" in found["k, uncaptured"].arguments and "graph.*" in found["k, captured"].arguments


def test_an_engine_with_and_without_graphs_is_watched_under_every_verifier():
    found = {target.name: target.caching for target in memcheck.targets(["k"], []) if "engine" in target.name}
    assert found == {
        f"engine, {verifier}, graph mode {mode}": mode == "full"
        for verifier in ("rejection", "block", "synthetic:2")
        for mode in ("none", "full")
    }


def test_patterns_stand_in_the_place_of_everything():
    assert [target.name for target in memcheck.targets(["k"], ["graph.*"])] == ["k, captured"]


@pytest.mark.parametrize("caching, seen", [(False, "1"), (True, "None")])
def test_the_process_sees_the_allocator_that_its_target_asks_for(sanitizer, caching, seen, monkeypatch):
    monkeypatch.setenv(NO_CACHING, "0")
    sanitizer()
    row = memcheck.sanitize(target(f"import os; print(os.environ.get('{NO_CACHING}'))", caching=caching), 60)
    assert row["finished"] and row["errors"] == 0 and row["printed"] == [seen]


def test_an_error_of_the_sanitizer_is_kept(sanitizer):
    sanitizer("========= Invalid __global__ read of size 4 bytes\n========= ERROR SUMMARY: 1 error")
    row = memcheck.sanitize(target("pass"), 60)
    assert row["errors"] == 1 and "Invalid" in row["said"][0]


def test_a_process_that_fails_or_leaves_no_summary_has_not_finished(sanitizer):
    sanitizer()
    assert not memcheck.sanitize(target("raise SystemExit(3)"), 60)["finished"]
    sanitizer("")
    assert not memcheck.sanitize(target("pass"), 60)["finished"]


@pytest.mark.parametrize(
    "outcomes, finished", [(["pass"], True), ([], False), (["pass", "not_run"], False), (["pass", "error"], False)]
)
def test_checks_have_finished_when_all_of_them_ran(sanitizer, outcomes, finished):
    sanitizer()
    report = json.dumps({"results": [{"outcome": outcome} for outcome in outcomes]})
    row = memcheck.sanitize(target(f"import sys; open(sys.argv[-1], 'w').write('{report}')", checks=True), 60)
    assert row["finished"] == finished


KEEPS_AND_HANGS = """
import json, sys, time
with open(sys.argv[-1] + ".part", "w") as file:
    for outcome in ("pass", "fail"):
        file.write(json.dumps({{"results": [{{"outcome": outcome}}]}}) + chr(10))
    file.write('{{"results": [')
open({mark!r}, "w").close()
time.sleep(600)
"""


@pytest.fixture
def hangs(tmp_path, monkeypatch):
    """Code that keeps what it finds and hangs, whereupon its limit passes."""
    mark, wait = tmp_path / "hangs", subprocess.Popen.wait

    def waited(process, seconds=None):
        while seconds is not None and process.poll() is None and not mark.exists():
            time.sleep(0.02)
        return wait(process, None if seconds is None else 0)

    monkeypatch.setattr(subprocess.Popen, "wait", waited)
    return KEEPS_AND_HANGS.format(mark=str(mark))


def test_a_process_that_is_cut_off_has_not_finished_and_what_it_found_is_kept(sanitizer, hangs):
    sanitizer()
    row = memcheck.sanitize(target(hangs, checks=True), 5)
    assert not row["finished"] and row["errors"] is None and row["exit_status"] is None
    assert row["checks"] == {"pass": 1, "fail": 1} and row["printed"] == ["cut off after 5 s"]


def test_the_report_has_each_target_as_soon_as_it_ended(tmp_path, monkeypatch):
    written = []
    monkeypatch.setattr(memcheck, "sanitize", lambda target, *_: {"target": target.name, "finished": True, "errors": 0})
    monkeypatch.setattr(memcheck, "VERIFIERS", ())
    monkeypatch.setattr(
        memcheck, "write_report", lambda *_, **content: written.append((len(content["targets"]), content["finished"]))
    )
    memcheck.main(["a", "b", "--jobs", "1", "--json", str(tmp_path / "report.json")])

    assert [count for count, _ in written] == [1, 2, 3, 4]
    assert [finished for _, finished in written] == [False, False, False, True]


def test_each_gpu_has_as_many_targets_at_a_time_as_were_allowed(tmp_path, monkeypatch):
    running, most = Counter(), Counter()

    def sanitize(target, seconds, gpu):
        running[gpu] += 1
        most[gpu] = max(most[gpu], running[gpu])
        time.sleep(0.05)
        running[gpu] -= 1
        return {"target": target.name, "finished": True, "errors": 0}

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5")
    monkeypatch.setattr(memcheck, "sanitize", sanitize)
    monkeypatch.setattr(memcheck, "write_report", lambda *args, **content: None)
    memcheck.main([*"abcdef", "--jobs", "2", "--json", str(tmp_path / "report.json")])

    assert most == {"2": 2, "5": 2}


@pytest.mark.parametrize("verification", memcheck.VERIFIERS)
@pytest.mark.parametrize("mode", [GraphMode.NONE, GraphMode.FULL])
def test_the_engine_that_is_watched_serves_every_request(verification, mode, monkeypatch):
    monkeypatch.setattr(memcheck, "REQUESTS", 3)
    run = memcheck.serve(verification, mode, torch.device("cpu"))
    assert run.counts["requests"] == 3 and run.pages_lost == 0 and "never" not in run.counts["finished"]


def test_a_check_that_is_watched_repeats_its_looping_graphs_from_the_host(monkeypatch):
    monkeypatch.setattr(cuda, "WhileGraph", cuda.WhileGraph)
    used = []

    def check(arguments, **_):
        assert arguments == ["k", "--json", "report.json"]
        used.append(cuda.WhileGraph)
        raise SystemExit(0)

    monkeypatch.setattr(memcheck, "check", check)
    with pytest.raises(SystemExit):
        memcheck.main(["--check", "k", "--json", "report.json"])
    assert used == [memcheck.HostLoop]


@pytest.mark.parametrize("iterations", [0, 1, 5])
def test_the_hosts_loop_runs_its_body_after_its_first_part_until_the_flag_is_zero(iterations):
    flag, runs = torch.zeros(1, dtype=torch.int32), []

    def part(name):
        runs.append(name)
        flag.fill_(int(len(runs) <= iterations))

    loop = memcheck.HostLoop(flag, partial(part, "first"), partial(part, "body"), lambda fn: SimpleNamespace(replay=fn))
    assert not runs
    loop.replay()
    assert runs == ["first"] + ["body"] * iterations


def test_the_hosts_loop_is_made_as_the_devices_is():
    assert list(signature(memcheck.HostLoop).parameters) == list(signature(cuda.WhileGraph).parameters)

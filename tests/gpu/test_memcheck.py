"""Backends and engines under NVIDIA's compute-sanitizer.

torch's allocator keeps freed memory and rounds sizes up, so an access beyond a tensor can land in allocated memory,
undetected. Directly launched work therefore runs with PYTORCH_NO_CUDA_MEMORY_CACHING=1: out-of-range values in every
kernel that reads such values, poison and padding checks of each backend, its advance, its fused writes, and an engine
without graphs under each verifier. A capture needs the allocator, because a graph's memory must stay. So the graph
family, whole rounds in every strategy and an engine with graphs run with it.

A looping graph is repeated by the host here, iteration by iteration: if the device repeats it, the sanitizer (2025.3.1)
reports accesses "out of bounds" and "inside the nearest allocation", or the driver meets an illegal instruction. The
same happens with a WHILE node around a single torch product, which runs correctly without the sanitizer.
"""

from __future__ import annotations

import fnmatch
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from attn_backends import state_names
from scripts.free_places import share
from spec_decode.cli.main import main as attn_backends
from spec_decode.conformance import state_checks
from spec_decode.conformance.report import Report
from spec_decode.graphs import cuda
from spec_decode.paged import GraphMode
from spec_decode.testing.outcome import Outcome
from tests.gpu import busy_engine
from tests.import_graph import ROOT
from tests.spec_decode.matrix.evidence import report, result

SCHEMA = "attn-memcheck/2"
CHECKED = tuple(
    f"spec_decode.conformance.{name}_checks" for name in ("builder", "drafter", "graph", "numerics", "state")
)
"""Where the checks that are watched are defined."""
UNCAPTURED = "uncaptured"
PARTS = {
    UNCAPTURED: ("poison.*", "builder.padding_stays_inert*", "builder.advance_attends_right*", "numerics.fused_*"),
    "graphs": ("graph.*",),
    "rounds of 3 requests": ("drafter.strategies_agree[[]k[1-8]-n3[]]",),
    "rounds of 7 requests": ("drafter.strategies_agree[[]k[1-8]-n7[]]",),
}
STATE_PARTS = {UNCAPTURED: ("state.[!gs]*", "state.slots_*", "state.snapshots_*"), "graphs": ("state.graph_*",)}
"""The checks of each process of a backend, by pattern; those of recurrent state that repeat steps by the hundred are
left out. Under the sanitizer, and only there, a process never frees a
drafter: FlashInfer's take 2 GB per check of rounds."""
VERIFIERS = ("rejection", "block", "synthetic:2")
REQUESTS = 12
TARGET_BYTES = 25 << 30
"""GPU memory for one target: FlashInfer's rounds take 17 GB. If memory runs out, the sanitizer leaves kernels
unwatched."""
NO_CACHING = "PYTORCH_NO_CUDA_MEMORY_CACHING"


@dataclass(frozen=True)
class Target:
    """A Python process to run under the sanitizer. caching: whether torch's allocator keeps freed memory. checks:
    whether it takes --json FILE and writes a check report there."""

    name: str
    arguments: tuple[str, ...]
    caching: bool = False
    checks: bool = False


def targets(names: Sequence[str]) -> Iterator[Target]:
    """Yield out-of-range values for every kernel that reads them, the checks of these backends, and the engines."""
    here = ("-m", "tests.gpu.test_memcheck")
    yield Target("values out of range", (*here, "values"))
    for name in names:
        for part, patterns in (STATE_PARTS if name in state_names() else PARTS).items():
            only = [word for pattern in patterns for word in ("--only", pattern)]
            # Not isolated: HostLoop replaces WhileGraph in this process only.
            check_it = (*here, "check", name, "--no-isolate", "--device", "cuda", *only)
            yield Target(f"{name}, {part}", check_it, caching=part != UNCAPTURED, checks=True)
    for verification in VERIFIERS:
        for mode in (GraphMode.NONE, GraphMode.FULL):
            name = f"engine, {verification}, graph mode {mode.value}"
            yield Target(name, (*here, "serve", verification, mode.value), mode is GraphMode.FULL)


def sanitize(gpu: str, target: Target) -> dict[str, Any]:
    """Run the target under the sanitizer on one GPU and return its row: errors, check outcomes, exit status, time."""
    began = time.monotonic()
    env = {name: value for name, value in os.environ.items() if name != NO_CACHING}
    env |= {"CUDA_VISIBLE_DEVICES": gpu} | ({} if target.caching else {NO_CACHING: "1"})
    with tempfile.TemporaryDirectory() as folder:
        log, report, printed = (Path(folder, name) for name in ("log", "report.json", "printed"))
        command = [
            # Memory accesses only: a binding that asks the driver for a missing symbol causes an API error, too.
            *("compute-sanitizer", "--tool", "memcheck", "--report-api-errors", "no"),
            # Not the compilers that a kernel package starts: a run that followed them never ended.
            *("--target-processes", "application-only", "--log-file", str(log)),
            *(sys.executable, *target.arguments, *(("--json", str(report)) if target.checks else ())),
        ]
        # To a file: a process that the target leaves behind would keep a pipe open.
        with printed.open("w") as output:
            streams = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": subprocess.STDOUT}
            status = subprocess.run(command, env=env, cwd=ROOT, **streams).returncode
        text = log.read_text() if log.exists() else ""
        last = printed.read_text(errors="replace").splitlines()[-5:]
        results = Report.load(report).results if report.exists() else ()
    outcomes = Counter(result.outcome.value for result in results)
    summary = re.search(r"ERROR SUMMARY: (\d+) error", text)
    # An error is a check that stopped early, out of memory for example: the rest of it was not seen.
    whole = bool(outcomes) and not outcomes.keys() & {"not_run", "error"}
    return {
        "target": target.name,
        "caching": target.caching,
        "finished": summary is not None and (whole if target.checks else status == 0),
        "errors": int(summary.group(1)) if summary else None,
        "checks": dict(outcomes),
        "exit_status": status,
        "seconds": round(time.monotonic() - began, 1),
        "said": [line for line in text.splitlines() if "Invalid" in line or "error" in line.lower()][:20],
        "printed": last,
    }


class HostLoop:
    """Stands in for WhileGraph: the same captured parts, but the host reads the flag after each iteration."""

    num_nodes: int | None = None

    def __init__(
        self,
        continue_flag: torch.Tensor,
        first: Callable[[], object],
        body: Callable[[], object],
        capture: Callable[[Callable[[], object]], torch.cuda.CUDAGraph],
    ) -> None:
        self._continue_flag, self._first, self._body = continue_flag, capture(first), capture(body)

    def replay(self) -> None:
        self._first.replay()
        while self._continue_flag.item():
            self._body.replay()


def serve(verification: str, mode: GraphMode, device: torch.device) -> busy_engine.BusyRun:
    """Serve requests of every kind with a small engine of the shipped pair and one verifier."""
    requests = busy_engine.make_requests(REQUESTS, random.Random(0))
    pair, rng = busy_engine.load_pair(device), random.Random(0)
    return busy_engine.serve(pair, verification, requests, rng, graph_mode=mode)


def jobs_per_gpu() -> int:
    """Return how many targets fit the smallest GPU at a time."""
    sizes = [torch.cuda.get_device_properties(gpu).total_memory for gpu in range(torch.cuda.device_count())]
    return max(1, min(sizes) // TARGET_BYTES)


def sanitize_all(names: Sequence[str], write: Callable[..., None]) -> list[dict[str, Any]]:
    """Return one row per target. Writes the report after each, so an interrupted run leaves an unfinished report."""
    watched, rows, lock = list(targets(names)), list[dict[str, Any]](), threading.Lock()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(torch.cuda.device_count())))
    roots = ["spec_decode.engine.engine", *CHECKED]

    def run_on(gpu: str, target: Target) -> None:
        row = sanitize(gpu, target)
        with lock:
            rows.append(row)
            checks = {"checks": PARTS, "state_checks": STATE_PARTS}
            content = {"finished": len(rows) == len(watched), **checks, "targets": rows}
            write(SCHEMA, roots=roots, backends=names, **content)

    share(visible.split(",") * jobs_per_gpu(), watched, run_on)
    return rows


@pytest.mark.gpu
def test_memcheck_reports_no_errors(backends, request, write_report):
    default = request.config.getoption("--attn-backend") in ("available", "all")
    names = [*backends, *(state_names() if default else ())]
    assert not [row for row in sanitize_all(names, write_report) if row["errors"] != 0 or not row["finished"]]


def main(what: str, *arguments: str) -> None:
    """Be the target process: `values`, `serve VERIFIER MODE`, or `check` with the arguments of a check."""
    if what == "values":
        os.environ["OUT_OF_RANGE_DEVICE"] = "cuda"
        raise SystemExit(
            pytest.main(["-q", "-p", "no:cacheprovider", str(ROOT / "tests/interpreter/test_out_of_range.py")])
        )
    if what == "serve":
        verification, mode = arguments
        print(json.dumps(serve(verification, GraphMode(mode), torch.device("cuda")).counts))
    else:
        mock.patch.object(cuda, "WhileGraph", HostLoop).start()
        attn_backends([what, *arguments])


# On a CPU: what runs under which allocator, when a target counts as finished, and the engines.

SANITIZER = """#!{python}
import subprocess, sys
at = sys.argv.index("--log-file") + 1
ended = subprocess.run(sys.argv[at + 1:]).returncode
open(sys.argv[at], "w").write({says!r})
sys.exit(ended)
"""


def test_uncaptured_targets_disable_caching_allocator():
    found = {target.name: target for target in targets(["k"])}
    assert "poison.*" in found["k, uncaptured"].arguments and "graph.*" in found["k, graphs"].arguments
    assert {name: target.caching for name, target in found.items()} == {
        "values out of range": False,
        "k, uncaptured": False,
        "k, graphs": True,
        "k, rounds of 3 requests": True,
        "k, rounds of 7 requests": True,
        **{f"engine, {verifier}, graph mode none": False for verifier in ("rejection", "block", "synthetic:2")},
        **{f"engine, {verifier}, graph mode full": True for verifier in ("rejection", "block", "synthetic:2")},
    }


def test_states_have_checks_of_their_own():
    found = {target.name: target.arguments for target in targets(["torch_state"]) if target.checks}
    functions = (name for name, each in vars(state_checks).items() if getattr(each, "__module__", "") == CHECKED[-1])
    names = [f"state.{name}" for name in functions if not name.startswith("_")]
    chosen = {name: {each for word in words for each in fnmatch.filter(names, word)} for name, words in found.items()}
    assert chosen["torch_state, graphs"] == {"state.graph_replays_over_other_batches"}
    assert {"state.padding_stays_inert", "state.trees_follow_the_path"} <= chosen["torch_state, uncaptured"]
    assert not chosen["torch_state, uncaptured"] & chosen["torch_state, graphs"]


CLEAN, WRONG = (
    "========= ERROR SUMMARY: 0 errors",
    "========= Invalid __global__ read\n========= ERROR SUMMARY: 1 error",
)
PRINTS = f"import os; print(os.environ.get('{NO_CACHING}'))"


@pytest.fixture
def sanitizer(tmp_path, monkeypatch):
    """Puts a stand-in on PATH that runs its target and writes the given text to its log."""

    def install(says):
        path = tmp_path / "compute-sanitizer"
        path.write_text(SANITIZER.format(python=sys.executable, says=says))
        path.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
        monkeypatch.setenv(NO_CACHING, "0")

    return install


def reports(*outcomes):
    """A child that writes a report of checks with these outcomes."""
    whole = report(*(result(outcome) for outcome in outcomes)).to_json().decode()
    return f"import sys; open(sys.argv[-1], 'w').write({whole!r})"


@pytest.mark.parametrize(
    ("code", "says", "options", "expected"),
    [
        (PRINTS, CLEAN, {}, {"finished": True, "errors": 0, "printed": ["1"]}),
        (PRINTS, CLEAN, {"caching": True}, {"finished": True, "printed": ["None"]}),
        (PRINTS, WRONG, {}, {"finished": True, "errors": 1, "said": WRONG.splitlines()}),
        ("raise SystemExit(3)", CLEAN, {}, {"finished": False, "exit_status": 3}),
        (PRINTS, "", {}, {"finished": False, "errors": None}),
        (PRINTS, CLEAN, {"checks": True}, {"finished": False, "checks": {}}),
        (reports(), CLEAN, {"checks": True}, {"finished": False}),
        (reports("pass", "fail"), CLEAN, {"checks": True}, {"finished": True, "checks": {"pass": 1, "fail": 1}}),
        (reports("pass", "not_run"), CLEAN, {"checks": True}, {"finished": False}),
        (reports("pass", "error"), CLEAN, {"checks": True}, {"finished": False}),
    ],
)
def test_memcheck_row_reports_errors_under_its_allocator(code, says, options, expected, sanitizer):
    sanitizer(says)
    assert expected.items() <= sanitize("0", Target("t", ("-c", code), **options)).items()


def test_each_gpu_runs_allowed_targets_and_reports_each(monkeypatch):
    running, most, written = Counter(), Counter(), []

    def pretend(gpu, target):
        running[gpu] += 1
        most[gpu] = max(most[gpu], running[gpu])
        time.sleep(0.05)
        running[gpu] -= 1
        return {"target": target.name}

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5")
    monkeypatch.setattr(f"{__name__}.sanitize", pretend)
    monkeypatch.setattr(f"{__name__}.jobs_per_gpu", lambda: 2)
    sanitize_all("abc", lambda schema, *, finished, targets, **_: written.append((len(targets), finished)))
    assert most == {"2": 2, "5": 2}
    assert written == [(count, count == 19) for count in range(1, 20)]


@pytest.mark.parametrize(("gib", "jobs"), [((79, 79), 3), ((139,), 5), ((139, 79), 3), ((16,), 1)])
def test_jobs_per_gpu_follow_smallest_gpu_memory(gib, jobs, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(gib))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda gpu: SimpleNamespace(total_memory=gib[gpu] << 30))
    assert jobs_per_gpu() == jobs


def test_target_ends_before_processes_it_started(sanitizer, tmp_path):
    sanitizer(CLEAN)
    release, late = tmp_path / "release", tmp_path / "late"
    waits = f"""
import pathlib, time
for _ in range(200):
    time.sleep(0 if pathlib.Path({str(release)!r}).exists() else 0.1)
pathlib.Path({str(late)!r}).touch()
"""
    row = sanitize(
        "0", Target("t", ("-c", f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {waits!r}])"))
    )
    assert row["finished"] and not late.exists()
    release.touch()


def test_sanitizer_ignores_child_processes(monkeypatch):
    commands = []

    def run(command, **_):
        commands.append(command)
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(subprocess, "run", run)
    sanitize("0", Target("t", ("-c", "pass")))
    (command,) = commands
    assert command[command.index("--target-processes") + 1] == "application-only"


@pytest.mark.parametrize("verification", VERIFIERS)
@pytest.mark.parametrize("mode", [GraphMode.NONE, GraphMode.FULL])
def test_checked_engine_serves_every_request(verification, mode, monkeypatch):
    monkeypatch.setattr(f"{__name__}.REQUESTS", 3)
    run = serve(verification, mode, torch.device("cpu"))
    assert run.counts["requests"] == 3 and run.pages_lost == 0 and "never" not in run.counts["finished"]


def test_memcheck_run_loops_graphs_from_the_host(monkeypatch, tmp_path):
    monkeypatch.setattr(cuda, "WhileGraph", cuda.WhileGraph)
    path, only = tmp_path / "report.json", ("--only", "builder.padding_stays_inert*", "--quick")
    with pytest.raises(SystemExit) as ended:
        main("check", "torch_reference", "--no-isolate", "--device", "cpu", *only, "--json", str(path))
    results = Report.load(path).results
    assert ended.value.code == 0 and results and all(result.outcome is Outcome.PASS for result in results)
    assert cuda.WhileGraph is HostLoop


@pytest.mark.parametrize("iterations", [0, 1, 5])
def test_host_loop_repeats_body_until_flag_is_zero(iterations):
    flag, runs = torch.zeros(1, dtype=torch.int32), []

    def part(name):
        runs.append(name)
        flag.fill_(int(len(runs) <= iterations))

    loop = HostLoop(flag, partial(part, "first"), partial(part, "body"), lambda fn: SimpleNamespace(replay=fn))
    assert not runs
    loop.replay()
    assert runs == ["first"] + ["body"] * iterations
    assert list(signature(HostLoop).parameters) == list(signature(cuda.WhileGraph).parameters)


if __name__ == "__main__":
    main(*sys.argv[1:])

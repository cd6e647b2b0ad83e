"""Rows measured by several processes: the slowest is kept."""

import sys

import pytest

from benchmarks import processes
from benchmarks.processes import run_in_processes, slowest
from builders import BatchError
from spec_decode.tools.timing_limit import verdict
from tests.factories import CPU
from tests.spec_decode.matrix.evidence import ENV


def row(case, p50, quantity="gpu_us", **more):
    return {"case": case, "backend": "triton_paged", "num_reqs": 1, quantity: {"p50": p50}, **more}


@pytest.mark.parametrize("quantity", ["gpu_us", "wall_us", "host_us"])
def test_slowest_process_row_is_taken_whole(quantity):
    runs = [[row("a", 2.0, quantity, floor_ratio=1), row("b", 5.0, quantity)], [row("a", 3.0, quantity, floor_ratio=2)]]
    a, b = slowest(runs)
    assert (a[quantity]["p50"], a["floor_ratio"], a["p50_of_processes"]) == (3.0, 2, [2.0, 3.0])
    assert (b[quantity]["p50"], b["p50_of_processes"]) == (5.0, [5.0])


HEAD = {"schema": "attn-bench/3", "env": {**ENV, "kernel_interval_us": 0.84}, "command": "a child's"}
CHILD = f"""
import json, sys
target, cases = sys.argv[sys.argv.index("--json") + 1], sys.argv[2:sys.argv.index("--device")]
head = {HEAD!r}
row = dict(backend="k", num_reqs=1, gpu_us=[0.5, 1.0, 2.0], limits=[["gpu_us", 2.0, False, True]])
rows = [dict(row, case=case) for case in cases]
json.dump(dict(head, missing=["x: stopped by RuntimeError: y"], rows=rows), open(target, "w"))
sys.exit(1)
"""


def test_each_process_runs_same_cases(monkeypatch):
    monkeypatch.setattr(processes, "_CHILD", (sys.executable, "-c", CHILD))
    seen = []
    bench = run_in_processes(
        2, device=CPU, cases=("a", "b"), on_row=lambda bench: seen.append(bench.rows[-1]), command="the command"
    )
    assert bench.command == "the command" and bench.env["kernel_interval_us"] == 0.84
    for found, case in zip(bench.rows, "ab", strict=True):
        assert (found["case"], found["p50_of_processes"], found["kernel_interval_us"]) == (case, [1.0, 1.0], 0.84)
        assert verdict(found["limits"]) == ("gpu_us <= 2", True) and "env" not in found
    assert seen == bench.rows and bench.missing == bench.stopped == ["x: stopped by RuntimeError: y"]


@pytest.mark.parametrize(
    "child, ended",
    [
        ("import sys; sys.exit('no such GPU')", "ended with 1 after 0: no such GPU"),
        (CHILD.replace("stopped by", "no"), "ended with 1 after 1: no error output"),
        (CHILD.replace("sys.exit(1)", "import os; os.abort()"), "ended with -6 after 1"),
    ],
)
def test_process_missing_rows_ends_run_with_its_error(child, ended, monkeypatch):
    monkeypatch.setattr(processes, "_CHILD", (sys.executable, "-c", child))
    with pytest.raises(BatchError, match=ended):
        run_in_processes(2, device=CPU, cases=("a",))

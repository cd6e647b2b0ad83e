"""Run checks of backends under NVIDIA's compute-sanitizer: python scripts/memcheck.py NAME... --json FILE."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from scripts.script_report import write_report

SCHEMA = "attn-memcheck/1"
CHECKS = ("graph.*", "drafter.strategies_agree[[]k[1-8]-n[37][]]")
"""The graph family, and whole rounds of K = 1..8 with requests that stop on the way."""


def memcheck(name: str, patterns: list[str], seconds: float) -> dict[str, Any]:
    """The checks' outcomes and the sanitizer's verdict on the process that ran them."""
    with tempfile.TemporaryDirectory() as folder:
        log, report = Path(folder, "log"), Path(folder, "report.json")
        only = [part for pattern in patterns for part in ("--only", pattern)]
        command = [
            *("compute-sanitizer", "--tool", "memcheck", "--target-processes", "all", "--log-file", str(log)),
            *(sys.executable, "-m", "spec_decode", "check", name, "--device", "cuda", *only, "--json", str(report)),
        ]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
        except subprocess.TimeoutExpired:
            return {"backend": name, "finished": False, "errors": None, "seconds_allowed": seconds}
        text = log.read_text() if log.exists() else ""
        summary = re.search(r"ERROR SUMMARY: (\d+) error", text)
        results = json.loads(report.read_text())["results"] if report.exists() else []
    outcomes: dict[str, int] = {}
    for result in results:
        outcomes[result["outcome"]] = outcomes.get(result["outcome"], 0) + 1
    return {
        "backend": name,
        "finished": summary is not None and bool(results),
        "errors": int(summary.group(1)) if summary else None,
        "checks": outcomes,
        "exit_status": done.returncode,
        "said": [line for line in text.splitlines() if "Invalid" in line or "error" in line.lower()][:20],
    }


def main() -> None:
    """Check every backend, write the report, and fail unless each finished without an error."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="+")
    parser.add_argument("--only", action="append", help=f"checks to run, {' and '.join(CHECKS)} if left out")
    parser.add_argument("--seconds", type=float, default=400.0, help="time allowed for a backend")
    parser.add_argument("--jobs", type=int, default=4)
    parser.add_argument("--json", type=Path, required=True)
    flags = parser.parse_args()
    patterns = flags.only or list(CHECKS)
    with ThreadPoolExecutor(flags.jobs) as pool:
        rows = list(pool.map(lambda name: memcheck(name, patterns, flags.seconds), flags.names))
    write_report(flags.json, SCHEMA, torch.device("cuda"), checks=patterns, backends=rows)
    for row in rows:
        print(row)
    if not all(row["finished"] and row["errors"] == 0 for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()

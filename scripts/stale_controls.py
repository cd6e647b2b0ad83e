"""Show that stale metadata is caught on a device: python scripts/stale_controls.py NAME... --json FILE.

For each backend, a builder whose metadata stays at the lengths it was built for must fail the checks that a right one
passes. A control that passes means that the check could not have found the defect. Each control has a process of its
own, for stale metadata may end in an illegal memory access, which takes the whole process's device with it.
"""

from __future__ import annotations

import multiprocessing
import sys
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from attn_backends import AttentionBackend, get
from scripts.script_report import script_options, write_report
from spec_decode.conformance import check_backend

SCHEMA = "attn-stale-controls/2"
CHECKS = (
    "builder.advance_attends_right",
    "builder.advance_refreshes_another_batch",
    "graph.loop_replays_over_other_batches",
    "graph.verify_replays_over_other_batches",
)
FAULTS = ("CUDA error", "illegal memory access")
"""A device's messages for what reading by stale metadata may end in."""


def stale(name: str) -> AttentionBackend:
    """The backend, with lengths copied at build and an advance that does nothing."""
    kind = type(get(name))
    original = kind.builder

    def build(self: Any, batch: Any, *, horizon: int = 0) -> Any:
        metadata = original.build(self, batch, horizon=horizon)
        return replace(metadata, seq_lens=metadata.seq_lens.clone())

    methods = {
        "build": build,
        "advance": lambda self, metadata: None,
        "advance_support": classmethod(lambda cls, spec, device: original.advance_support(spec, device)),
    }
    builder = type("Stale", (original,), methods)
    backend: AttentionBackend = type("StaleBackend", (kind,), {"builder": builder, "name": f"{name}_stale"})()
    return backend


def control(job: tuple[str, str], device: torch.device) -> dict[str, Any]:
    """What one check finds of one stale backend: how many cases, and the first that is no pass."""
    name, check = job
    report = check_backend(stale(name), device=device, checks=[check])
    ran = [result for result in report.results if result.outcome.value not in ("unsupported", "unavailable")]
    wrong = [result for result in ran if result.outcome.value == "fail" or any(x in result.reason for x in FAULTS)]
    return {
        "backend": name,
        "version": report.version,
        "check": check,
        "cases": len(ran),
        "caught": bool(wrong),
        "first": wrong[0].reason[:300] if wrong else [f"{r.outcome.value}: {r.reason[:300]}" for r in ran[:3]],
    }


def main() -> None:
    """Run every check on every stale backend, write what they found, and fail unless each caught it."""
    parser = script_options(__doc__)
    parser.add_argument("names", nargs="+")
    parser.add_argument("--jobs", type=int, default=4)
    flags = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    rows = []
    with context.Pool(flags.jobs, maxtasksperchild=1) as pool:
        for row in pool.imap(partial(control, device=flags.device), product(flags.names, CHECKS)):
            rows.append(row)
            print(row["backend"], row["check"], "caught" if row["caught"] else "NOT CAUGHT", row["first"], flush=True)
    write_report(flags.json, SCHEMA, flags.device, controls=rows)
    if not all(row["caught"] for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()

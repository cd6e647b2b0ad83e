"""Show that stale metadata is caught on a device: python scripts/stale_controls.py NAME... --json FILE.

For each backend, a builder whose metadata stays at the lengths it was built for must fail the checks that a right one
passes. A control that passes means that the check could not have found the defect.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from attn_backends import AttentionBackend, get
from scripts.provenance import provenance
from spec_decode.conformance import check_backend

SCHEMA = "attn-stale-controls/1"
CHECKS = (
    "builder.advance_attends_right",
    "builder.advance_refreshes_another_batch",
    "graph.loop_replays_over_other_batches",
    "graph.verify_replays_over_other_batches",
)


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
    return type("StaleBackend", (kind,), {"builder": builder, "name": f"{name}_stale"})()


def main() -> None:
    """Run the checks on every stale backend, write what they found, and fail unless each caught it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="+")
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda"))
    parser.add_argument("--json", type=Path, required=True)
    flags = parser.parse_args()
    rows = []
    for name in flags.names:
        report = check_backend(stale(name), device=flags.device, checks=CHECKS)
        caught = dict.fromkeys(CHECKS, False)
        for result in report.results:
            caught[result.check] |= result.outcome.value == "fail"
        rows.append({"backend": name, "version": report.version, "caught_by": caught})
        print(name, caught)
    report = {**provenance(SCHEMA, flags.device), "controls": rows}
    flags.json.write_text(json.dumps(report, indent=1) + "\n")
    if not all(all(row["caught_by"].values()) for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()

"""Draft with the shipped pair on every backend it fits: python scripts/pair_agreement.py --json FILE.

In every strategy, tokens and kept drafts must be those of eager drafting, greedily and at temperature 1. In float32
where a backend has it, else in bfloat16, whose greedy text may leave plain decoding's where two candidates lie within
rounding.
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

from attn_backends import registry
from scripts.provenance import provenance
from spec_decode.commands.comparison import PROMPTS, compare, demo_requests
from spec_decode.commands.drafting import BytesPair, choose_backends, device_of, load_bytes_pair
from spec_decode.models import SHIPPED_PAIR, draft_names

SCHEMA = "attn-pair-agreement/1"
TEMPERATURES = (0.0, 1.0)


def agreement(pair: BytesPair, name: str, temperature: float) -> list[dict[str, Any]]:
    """A row for every strategy that the backend can run the draft in."""
    serves_both = registry.explain(name, pair.target_spec, device_of(pair))
    requests = [replace(request, temperature=temperature) for request in demo_requests()]
    found = compare(pair, choose_backends(pair, name if serves_both else None, name), requests, lambda text: None)
    return [
        {
            "strategy": row.strategy.value,
            "temperature": temperature,
            "refusal": row.refusal,
            "prompts": PROMPTS,
            "unlike_eager": row.unlike_eager,
            "unlike_plain": row.unlike_plain if temperature == 0 else None,
            "accepted": row.outcome and round(row.outcome.stats.mean_accepted, 3),
        }
        for row in found.rows
    ]


def main() -> None:
    """Compare, write the report, and fail if a strategy drafted other tokens than eager."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda"))
    parser.add_argument("--json", type=Path, required=True)
    flags = parser.parse_args()
    rows = []
    for draft in draft_names(SHIPPED_PAIR):
        pairs = {
            str(dtype).removeprefix("torch."): load_bytes_pair(SHIPPED_PAIR, dtype, flags.device, draft=draft)
            for dtype in (torch.float32, torch.bfloat16)
        }
        for name in registry.names():
            served = (d for d, pair in pairs.items() if registry.explain(name, pair.draft_spec, flags.device))
            if (dtype := next(served, None)) is None:
                continue
            for temperature in TEMPERATURES:
                for row in agreement(pairs[dtype], name, temperature):
                    rows.append({"draft": draft, "backend": name, "dtype": dtype, **row})
                    print(*rows[-1].values())
    report = {**provenance(SCHEMA, flags.device), "rows": rows}
    flags.json.write_text(json.dumps(report, indent=1) + "\n")
    if any(row["unlike_eager"] for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()

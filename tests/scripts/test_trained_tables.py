"""The table of the trained model, made from a small report."""

from __future__ import annotations

from typing import Any

import pytest

from scripts import trained_tables
from scripts.trained_arm import BASE, NARROW, NARROW_BASE, TrainedArm, trained_arms


def compared(arm: TrainedArm, against: TrainedArm) -> list[dict[str, Any]]:
    pair = {"arm": arm.name, "against": against.name}
    greedy = {**pair, "equal_texts": 5, "texts": 32, "rounds_ratio": 1.0041, "error": 0.0032}
    return [greedy, {**pair, "kept_ratio": 0.9768, "error": 0.0146}]


def report(*rows: dict[str, Any]) -> dict[str, Any]:
    texts = [{"requests": 32, "temperature": 0.0}, {"requests": 512, "temperature": 1.0}]
    names = ("backend", "linears", "head", "cache", "draft_cache")
    arms = [
        {"arm": {"name": arm.name, **{name: getattr(arm, name) for name in names}}, "rows": texts, "vllm": "0.33.0"}
        for arm in trained_arms()
    ]
    return {"env": {"device": "NVIDIA H200", "date": "2026-11-29T00:00:00"}, "arms": arms, "agreement": [*rows]}


def test_each_engine_is_beside_its_peer() -> None:
    base, in_graph, _, _, _, plain, channels, rounded, triton, paged, _, apart = trained_arms()
    pairs = ((in_graph, base), (plain, base), (rounded, channels), (paged, triton), (apart, triton))
    rows = [row for pair in pairs for row in compared(*pair)]
    title, shown = trained_tables.table(report(*rows)).split("\n\n")
    assert title == "vLLM 0.33.0, H200, 2026-11-29; texts: 32 at temperature 0 and 512 at temperature 1."
    numbers = "5 of 32 | 1.004 ± 0.003 | 0.977 ± 0.015 |"
    assert shown.splitlines()[2:] == [
        f"| `FLASHINFER_IN_GRAPH` | `{BASE}` | {numbers}",
        f"| `{BASE}`, our layers in 16 bits, our head in 16 bits | `{BASE}` | {numbers}",
        f"| `{BASE}`, our layers in 8 bits, our head in 8 bits | `{BASE}`, draft in 8 bits | {numbers}",
        f"| `{NARROW}`, cache in 8 bits | `{NARROW_BASE}`, cache in 8 bits | {numbers}",
        f"| `{NARROW}`, cache in 8 bits, the draft's in 16 | `{NARROW_BASE}`, cache in 8 bits | {numbers}",
    ]


def test_report_that_compares_nothing_is_rejected() -> None:
    with pytest.raises(ValueError, match="compares nothing"):
        trained_tables.table(report())

"""The table of engines' own tests, made from small reports."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from scripts.others_tables import table


def report(rows: Sequence[tuple[str, str]], *, cuda: str | None = None, device: str = "A CPU") -> dict[str, Any]:
    env = {"device": device, "cuda": cuda, "date": "2026-11-29T00:00:00"}
    return {"env": env, "rows": [{"backend": backend, "outcome": outcome} for backend, outcome in rows]}


def test_every_name_and_device_has_a_row_with_a_count_for_each_outcome() -> None:
    on_cpu = report([("OURS", "pass"), ("OURS", "skip"), ("OURS", "pass"), ("OTHER", "fail")])
    on_gpu = report([("OURS", "refused"), *[("OURS", "not run")] * 1200], cuda="13.0", device="NVIDIA H200")
    assert table([on_cpu, on_gpu]).splitlines() == [
        "| name | device, date | passed | failed | refused | not run | skipped |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: |",
        "| `OURS` | CPU, 2026-11-29 | 2 | 0 | 0 | 0 | 1 |",
        "| `OTHER` | CPU, 2026-11-29 | 0 | 1 | 0 | 0 | 0 |",
        "| `OURS` | H200, 2026-11-29 | 0 | 0 | 1 | 1,200 | 0 |",
    ]


def test_an_outcome_without_a_column_is_refused() -> None:
    with pytest.raises(ValueError, match="'crashed'"):
        table([report([("OURS", "pass"), ("OURS", "crashed")])])

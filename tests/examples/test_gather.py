"""The backend of examples/gather.py passes the kit."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch

import attn_backends
from spec_decode.conformance import check_backend

EXAMPLE = Path(__file__).parents[2] / "examples" / "gather.py"


FAMILIES = ["contract", "builder", "graph", "poison"]
SMALL = [f"{family}.*[[]base-*" for family in FAMILIES]


@pytest.mark.parametrize("checks", [SMALL, pytest.param(None, marks=pytest.mark.slow)], ids=["small", "whole"])
def test_smallest_backend_passes_the_kit(checks: list[str] | None) -> None:
    runpy.run_path(str(EXAMPLE))
    try:
        check_backend("gather", device=torch.device("cpu"), families=FAMILIES, checks=checks)
    finally:
        attn_backends.unregister("gather")

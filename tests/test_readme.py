"""The README's backend is run, not trusted."""

import re
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

import attn_backends
import builders
from spec_decode.conformance import check_backend

README = (Path(__file__).parent.parent / "README.md").read_text()


def test_the_example_backend_passes_the_kit(monkeypatch: pytest.MonkeyPatch) -> None:
    code = re.search(r"```python\n(.*?)```", README, re.DOTALL)
    assert code
    module = ModuleType("readme_example")
    names = {name: getattr(package, name) for package in (builders, attn_backends) for name in package.__all__}
    module.__dict__.update(names, torch=torch, replace=replace)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    try:
        exec(code[1], module.__dict__)
        report = check_backend(
            "gather", device=torch.device("cpu"), families=["contract", "builder", "graph", "poison"]
        )
    finally:
        attn_backends.unregister("gather")

    report.raise_if_failed()


def test_every_file_in_the_map_exists() -> None:
    rows = [line for line in README.splitlines() if line.startswith("| ") and "`" in line.split("|")[2]]
    root = Path(__file__).parent.parent
    for row in rows:
        folder = ""
        for name in re.findall(r"`([^`]+)`", row.split("|")[2]):
            folder = name.rsplit("/", 1)[0] + "/" if "/" in name.rstrip("/") else folder
            path = name if "/" in name.rstrip("/") or not folder else folder + name
            assert (root / path).exists() or (root / "spec_decode" / name).exists(), path

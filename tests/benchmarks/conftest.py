import sys

import pytest

from benchmarks import measure
from benchmarks.rows import Bench
from tests.benchmarks import fake_flashinfer
from tests.factories import CPU


@pytest.fixture(autouse=True)
def one_repeat(monkeypatch):
    """These tests do not examine how long a call took on this CPU."""
    monkeypatch.setattr(measure, "_WARMUP", 0)
    monkeypatch.setattr(measure, "_REPEATS", 1)


@pytest.fixture
def bench():
    return Bench(CPU, None)


@pytest.fixture
def flashinfer(monkeypatch):
    """The stand-in and the modules built on it, removed afterwards."""
    ours = ("builders.flashinfer.builder", "builders.flashinfer.wrappers", "attn_backends.flashinfer")
    names = (*ours, "benchmarks.flashinfer_plans")
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    for name, module in fake_flashinfer.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    from benchmarks import flashinfer_plans

    yield flashinfer_plans
    for name in names:
        sys.modules.pop(name, None)

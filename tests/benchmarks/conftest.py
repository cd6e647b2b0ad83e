import pytest

from benchmarks import measure


@pytest.fixture(autouse=True)
def few_repeats(monkeypatch):
    """What a call took on this CPU is not what these tests are about."""
    monkeypatch.setattr(measure, "_WARMUP", 1)
    monkeypatch.setattr(measure, "_REPEATS", 3)

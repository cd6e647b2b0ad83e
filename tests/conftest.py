import gc

import pytest
import torch
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)
settings.register_profile(
    "repeatable",
    derandomize=True,
    deadline=None,
    max_examples=60,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("repeatable")

_LONG = ("test_interpreter_conformance", "test_real_pair", "test_engine_batching", "tests/examples/")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest tests first, so that no worker is left with one of them at the end."""
    items.sort(key=lambda item: not any(name in item.nodeid for name in _LONG))


def pytest_collection_finish() -> None:
    """No collection of garbage looks again at what lives to the end: a million objects, of modules and of tests."""
    gc.collect()
    gc.freeze()

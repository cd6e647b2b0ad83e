import gc
import os
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)
# The processes that tests start, too: more threads only wait for each other beside the other tests.
os.environ.setdefault("OMP_NUM_THREADS", "1")
settings.register_profile(
    "repeatable",
    derandomize=True,
    deadline=None,
    max_examples=60,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("repeatable")

_LONG = ("test_op_kernels", "conformance/", "engine/", "models/", "attn_backends/", "tests/examples/")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first, so that no worker is left with one of them at the end."""
    items.sort(key=lambda item: not any(name in item.nodeid for name in _LONG))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """What commands set for their own process is undone: here they share it with the tests to come."""
    kept = {name: os.environ.get(name) for name in ("TRITON_INTERPRET", "OMP_NUM_THREADS")}
    try:
        return (yield)
    finally:
        if nextitem is not None and nextitem.path != item.path:
            keep_what_is_left()
        for name, value in kept.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def pytest_collection_finish() -> None:
    keep_what_is_left()


def keep_what_is_left() -> None:
    """No collection of garbage looks again at what most likely lives to the end: millions of objects, of modules, of
    tests and of what files of tests have cached."""
    gc.collect()
    gc.freeze()

import gc
import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

# For torch, which is not imported yet, and for processes that tests start: more threads only contend with the other
# tests. The process that only distributes tests never imports torch, which takes it seconds.
os.environ["OMP_NUM_THREADS"] = "1"
settings.register_profile(
    "repeatable",
    derandomize=True,
    deadline=None,
    max_examples=60,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("repeatable")

_LONG = (
    *("test_adding_a_backend", "test_interpreter_conformance", "test_wheel"),
    *("test_op_kernels", "conformance/", "engine/", "models/", "test_floors", "attn_backends/", "tests/examples/"),
)
"""Parts of the names of tests that take long; those in the first line take minutes if they are slow."""


@pytest.fixture(autouse=True)
def as_in_an_engine(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run tests as serving engines run: in inference mode, where torch's small operations are cheaper. Evidence is made
    outside of it, as it was."""
    import torch

    marks = {mark.name for mark in request.node.iter_markers()}
    with torch.inference_mode(marks.isdisjoint({"outside_inference_mode", "gpu"})):
        yield


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collect no garbage meanwhile: tests and modules are millions of objects, and none of them is."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the longest tests first, so that no worker is left with one at the end."""
    items.sort(key=lambda item: next((at for at, name in enumerate(_LONG) if name in item.nodeid), len(_LONG)))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """Undo what commands set for their own process: here they share it with later tests."""
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
    """Exempt from garbage collection what probably lives to the end: millions of objects of modules, of tests and of
    caches."""
    gc.collect()
    gc.freeze()

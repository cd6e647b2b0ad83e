"""What a capture into a CUDA graph does around torch's own capture, which is replaced here."""

import gc
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from spec_decode.graphs import CaptureError, cuda
from spec_decode.graphs.cuda import CudaRuntime
from tests.factories import CPU


@pytest.fixture
def events():
    return []


@pytest.fixture
def runtime(monkeypatch, events):
    stand_ins = {
        "CUDAGraph": lambda: SimpleNamespace(
            replay=None, capture_begin=lambda **_: events.append("begin"), capture_end=lambda: events.append("end")
        ),
        "Stream": lambda device: SimpleNamespace(device=device),
        "graph_pool_handle": lambda: None,
        "device": lambda device: nullcontext(),
        "stream": lambda stream: nullcontext(),
        "synchronize": lambda: None,
        "empty_cache": lambda: events.append("emptied"),
    }
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    return CudaRuntime(CPU)


def test_garbage_collection_is_off_during_capture(runtime):
    """In every thread, while any thread captures."""

    def captures(thread):
        collects = []

        def work():
            time.sleep(0.001 * (1 + thread))  # so that one thread ends before the other
            collects.append(gc.isenabled())

        for _ in range(20):
            runtime.capture(work)
        return any(collects)

    assert gc.isenabled()
    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(captures, range(2))) == [False, False]
    assert gc.isenabled()


def test_a_graph_with_a_call_that_holds_split_op_is_no_cycle(runtime, monkeypatch):
    monkeypatch.setattr(cuda, "_borrowed", lambda tensor: tensor)
    held = []

    def run(split_op):
        def call(t):
            return t + 1 if split_op else t

        held.append(weakref.ref(call))
        split_op(call, torch.ones(1))

    graph = runtime.capture_pieces(run)
    assert held[0]() is not None
    del graph
    assert held[0]() is None


@pytest.mark.parametrize(
    ("error", "expected", "words"),
    [
        (
            RuntimeError("it waits for the device"),
            CaptureError,
            "can only enqueue device work: it waits for the device",
        ),
        (CaptureError("of the loop"), CaptureError, "^of the loop$"),
        (torch.OutOfMemoryError("Tried to allocate 2 GiB"), torch.OutOfMemoryError, "^Tried to allocate 2 GiB$"),
    ],
)
def test_failed_capture_is_explained_and_next_one_works(runtime, monkeypatch, events, error, expected, words):
    """By its own error, not by that of the capture's end."""

    def fail():
        raise error

    def graph():
        def end():
            events.append("end")
            raise RuntimeError("the capture failed earlier")

        return SimpleNamespace(replay=None, capture_begin=lambda **_: events.append("begin"), capture_end=end)

    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "CUDAGraph", graph)
        with pytest.raises(expected, match=words):
            runtime.capture(fail)
    assert gc.isenabled() and events == ["emptied", "begin", "end"]
    runtime.capture(lambda: None)


def test_pieces_empty_the_caches_once(runtime, events):
    """The eager calls run between captures."""

    def call(name):
        events.append(name)
        return torch.zeros(0)

    def run(split_op):
        split_op(partial(call, "first"))
        split_op(partial(call, "second"))

    graph = runtime.capture_pieces(run)
    assert events == ["emptied", "begin", "end", "first", "begin", "end", "second", "begin", "end"]
    assert len(graph._parts) == 5 and [type(part).__name__ for part in graph._parts[1::2]] == ["SplitOpCall"] * 2

"""What a capture into a CUDA graph does around torch's own, which stands in here."""

import gc
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from spec_decode.graphs.cuda import CudaRuntime
from tests.factories import CPU


@pytest.fixture
def runtime(monkeypatch):
    stand_ins = {
        "CUDAGraph": lambda: SimpleNamespace(replay=None),
        "Stream": lambda device: SimpleNamespace(device=device),
        "graph_pool_handle": lambda: None,
        "device": lambda device: nullcontext(),
        "graph": lambda graph, **options: nullcontext(),
    }
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    return CudaRuntime(CPU)


def test_no_garbage_is_collected_while_any_thread_captures(runtime):
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

"""Why a looping CUDA graph cannot be used, as reported without a GPU."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from spec_decode.graphs import CaptureError, cuda_loop, loop_unsupported_reason
from tests.factories import CPU


@pytest.fixture(autouse=True)
def forget():
    def clear():
        cuda_loop.unsupported_reason.cache_clear()
        cuda_loop._bindings.cache_clear()

    clear()
    yield
    clear()


@pytest.fixture
def installed(monkeypatch):
    def install(version="13.1.0", driver=13000, nvrtc=lambda: (0, 13, 1)):
        package = ModuleType("cuda")
        bindings = ModuleType("cuda.bindings")
        bindings.__version__ = version
        parts = {
            "driver": SimpleNamespace(),
            "nvrtc": SimpleNamespace(nvrtcVersion=nvrtc),
            "runtime": SimpleNamespace(cudaDriverGetVersion=lambda: (0, driver)),
        }
        for name, module in {"cuda": package, "cuda.bindings": bindings}.items():
            module.__path__ = []
            monkeypatch.setitem(sys.modules, name, module)
        for name, module in parts.items():
            monkeypatch.setitem(sys.modules, f"cuda.bindings.{name}", module)

    return install


def test_loop_is_supported_with_bindings_and_driver(installed):
    installed()
    assert loop_unsupported_reason(torch.device("cuda")) is None


def no_library():
    raise RuntimeError("no libnvrtc")


MISSING = {
    "older bindings": ({"version": "12.9.2"}, "cuda.bindings 13 or later, found 12.9.2"),
    "driver 12.8": ({"driver": 12080}, "needs a driver for CUDA 13.0, found one for 12.8;"),
    "driver 12.99": ({"driver": 12990}, "needs a driver for CUDA 13.0, found one for 12.99;"),
    "no library": ({"nvrtc": no_library}, "no libnvrtc"),
}


@pytest.mark.parametrize(("changes", "reason"), MISSING.values(), ids=MISSING)
def test_missing_loop_requirement_is_named(installed, changes, reason):
    installed(**changes)
    assert reason in loop_unsupported_reason(torch.device("cuda"))
    with pytest.raises(CaptureError, match=f"{reason}.*No graph was made"):
        cuda_loop.WhileGraph(torch.ones(1, dtype=torch.int32), first=print, body=print, capture=print)


def test_missing_bindings_error_names_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    assert "pip install 'cuda-python>=13'" in loop_unsupported_reason(torch.device("cuda"))


def test_emulator_supports_loops():
    assert loop_unsupported_reason(CPU) is None

"""The replacement for Triton where it is not installed."""

import importlib.util
import sys

import pytest

from builders.kernels import triton_runtime


@pytest.fixture
def runtime(monkeypatch):
    """The module as it is where Triton cannot be imported."""
    monkeypatch.setitem(sys.modules, "triton", None)
    spec = importlib.util.spec_from_file_location("without_triton", triton_runtime.__file__)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_decorated_function_stays_itself(runtime):
    def function():
        return 7

    assert runtime.triton.jit(function) is function and runtime.triton.autotune(configs=[])(function) is function


def test_stub_names_exist_and_types_can_be_called(runtime):
    assert runtime.tl.constexpr(3) is runtime.tl and runtime.tl.extra.cuda is runtime.tl


def test_missing_triton_is_reason_on_gpu_not_cpu(runtime):
    assert runtime.triton_unsupported_reasons("cpu") == [] and not runtime.interpreting()
    assert runtime.triton_unsupported_reasons("cuda") == [
        "needs the package triton, which is not installed: pip install triton"
    ]
    assert runtime.TRITON_VERSION == "absent"

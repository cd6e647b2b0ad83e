"""vLLM with our names in it, and a stand-in for FlashInfer: for tests that ask for them."""

from __future__ import annotations

import importlib

import pytest

from builders.kernels.triton_runtime import torch_implementations
from engines import vllm as plug_in
from tests.engines import vllm_flashinfer as stand_in


@pytest.fixture(scope="module")
def vllm_inside():
    """vLLM, with our names registered as its plug-in loader registers them: twice."""
    from engines.vllm.conformance.stand_in import enter

    enter()
    plug_in.register()
    plug_in.register()


@pytest.fixture
def vllm_flashinfer(vllm_inside, monkeypatch):
    stand_in.HOST_PLANS.clear()
    monkeypatch.setenv("VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE", str(16 << 20))
    stand_in.install(monkeypatch, importlib.import_module("vllm.v1.attention.backends.flashinfer"))
    with torch_implementations():
        yield

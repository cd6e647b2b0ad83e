"""vLLM with our names in it, and stand-ins for kernels that need a GPU: for tests that ask for them."""

from __future__ import annotations

import importlib
from functools import cache

import pytest

from attn_backends import registry
from builders.kernels.triton_runtime import torch_implementations
from engines import vllm as plug_in
from tests import flash_attn3_stand_in, flashmla_stand_in
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


@pytest.fixture
def vllm_kernels(vllm_inside, monkeypatch):
    """Our backends over stand-ins for their kernels, where vLLM finds them by our names."""
    from engines.vllm.v0_33.backend import class_named

    for name in (*flash_attn3_stand_in.BACKENDS, "flashmla"):
        monkeypatch.setitem(registry._loaded, name, over_stand_in(name))
    class_named.cache_clear()
    yield
    class_named.cache_clear()


@cache
def over_stand_in(name):
    with flashmla_stand_in.installed() if name == "flashmla" else flash_attn3_stand_in.installed(name) as ours:
        return ours

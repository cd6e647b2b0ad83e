"""vLLM with our names registered, and stand-ins for kernels that need a GPU, as opt-in fixtures."""

from __future__ import annotations

import importlib
import sys
from functools import cache

import pytest

from attn_backends import registry
from attn_backends.engines import vllm as plug_in
from builders.kernels.triton_runtime import interpreting, torch_implementations
from spec_decode.testing.interpreter_speed import speed_up_interpreter
from tests import flash_attn3_stand_in, flashmla_stand_in
from tests.engines import vllm_flashinfer as stand_in

if interpreting():
    speed_up_interpreter()


@pytest.fixture(scope="module")
def vllm_inside():
    """vLLM, with our names registered twice, as its plug-in loader does."""
    from engine_kits.vllm.stand_in import enter

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
    """Our backends over stand-ins for their kernels, where vLLM looks them up by name."""
    from attn_backends.engines.vllm.backend import class_over

    for name in (*flash_attn3_stand_in.BACKENDS, "flashmla"):
        monkeypatch.setitem(registry._loaded, name, over_stand_in(name))
    class_over.cache_clear()
    yield
    class_over.cache_clear()


@pytest.fixture
def one_process(vllm_inside, monkeypatch, tmp_path):
    """vLLM's own models on the CPU, in a process group of size one."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import (
        destroy_distributed_environment,
        destroy_model_parallel,
        init_distributed_environment,
        initialize_model_parallel,
    )
    from vllm.v1.attention import selector

    with monkeypatch.context() as without_flashinfer:
        for name in [name for name in sys.modules if name.partition(".")[0] == "flashinfer"]:
            without_flashinfer.delitem(sys.modules, name)
        importlib.import_module("vllm.compilation.backends")
    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, f"file://{tmp_path}/group", 0, backend="gloo")
        initialize_model_parallel(1)
    selector._cached_get_attn_backend.cache_clear()
    yield
    selector._cached_get_attn_backend.cache_clear()
    destroy_model_parallel()
    destroy_distributed_environment()


@cache
def over_stand_in(name):
    with flashmla_stand_in.installed() if name == "flashmla" else flash_attn3_stand_in.installed(name) as ours:
        return ours

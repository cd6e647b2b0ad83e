"""A pytest plug-in that puts our names in the places of vLLM's, in vLLM 0.33's own tests of attention backends.

A test names backends in lists, or as AttentionBackendEnum's members. It runs once for each of our names, alone and in
the place of one of vLLM's: of FLASHINFER in its own tests, else of FlashAttention's. Two things that the tests leave
out are as in vLLM's loader: a layer is registered before its builder is made, and made in its model's default dtype.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

CUDA = torch.cuda.is_available()
DENSE = ("FLASHINFER_IN_GRAPH", "ATTN_BACKENDS_TRITON_PAGED", "ATTN_BACKENDS_FLASH_ATTN3")
LATENT = ("ATTN_BACKENDS_TRITON_MLA", "ATTN_BACKENDS_FLASH_ATTN3_MLA", "ATTN_BACKENDS_FLASHMLA")
FILES = {"v1/attention/test_attention_backends.py": DENSE, "v1/attention/test_mla_backends.py": LATENT}
"""vLLM's tests, and our names for them."""
_CHECKS = {"_test_backend_correctness", "_run_backend_correctness"}
"""The functions by which a test of these files compares backends with torch. The other tests name no backend."""
_FA2 = "test_flashinfer_fa2_spec_decode_correctness"
"""vLLM skips it on Hopper, where its FLASHINFER decodes with XQA. Ours decodes with FA2 there too."""
_MODELS: dict[str, dict[str, Any]] = {
    "meta-llama/Meta-Llama-3-8B": {
        "model_type": "llama", "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,
    },
    "Qwen/Qwen3-0.6B": {
        "model_type": "qwen3", "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
    },
    "microsoft/Phi-tiny-MoE-instruct": {
        "model_type": "phimoe", "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 128,
        "sliding_window": 2047,
    },
    "google/embeddinggemma-300m": {
        "model_type": "gemma3_text", "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 256,
        "sliding_window": 512,
    },
    "deepseek-ai/DeepSeek-R1": {"model_type": "deepseek_v3"},
}  # fmt: skip
"""By the name that a test asks the hub for: the type of the model, and its sizes as far as attention sees them."""


def write_configs(folder: Path) -> None:
    """Write a config.json for each of these models, and redirect vLLM to them."""
    from vllm.model_executor.models.registry import ModelRegistry

    from engine_kits.vllm.config import NoModel

    ModelRegistry.register_model("NoModel", NoModel)
    common = {"architectures": ["NoModel"], "torch_dtype": "bfloat16", "max_position_embeddings": 131072}
    for name, sizes in _MODELS.items():
        (folder / name).mkdir(parents=True)
        (folder / name / "config.json").write_text(json.dumps({**common, **sizes}), encoding="utf-8")
    redirects = json.dumps({name: str(folder / name) for name in _MODELS})
    (folder / "redirects.json").write_text(redirects, encoding="utf-8")
    os.environ["VLLM_MODEL_REDIRECT_PATH"] = str(folder / "redirects.json")


class InTheirPlaces:
    """The plug-in, with the fixtures of vLLM's conftest.py that these tests use."""

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        names = next(names for file, names in FILES.items() if metafunc.definition.path.match(file))
        metafunc.parametrize("ours", names, indirect=True)

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        items[:] = [item for item in items if _CHECKS & {*item.function.__code__.co_names}]
        for item in items:
            if (item.originalname, item.callspec.params["ours"]) == (_FA2, "FLASHINFER_IN_GRAPH"):
                needs_graph = item.callspec.params["use_cuda_graph"] and not CUDA
                item.own_markers = [pytest.mark.skip("it captures a CUDA graph").mark] if needs_graph else []

    @pytest.fixture(autouse=True)
    def ours(self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
        from vllm.v1.attention.backends.registry import AttentionBackendEnum as Names

        module, name = request.module, request.param
        theirs = "FLASH_ATTN_MLA" if name in LATENT else "FLASH_ATTN"
        if request.function.__name__.startswith("test_flashinfer"):
            theirs = "FLASHINFER"
        put = lambda name, value: monkeypatch.setattr(module, name, value, raising=False)  # noqa: E731
        if not CUDA:
            _run_on_the_cpu(request, monkeypatch)
        ours, backend = Names[name], Names[name].get_class()
        put("AttentionBackendEnum", renamed(Names, theirs, name))
        for variable, value in list(vars(module).items()):
            if isinstance(value, list) and any(isinstance(each, Names) for each in value):
                put(variable, [ours] if Names[theirs] in value else [])
        sizes = backend.get_supported_kernel_block_sizes()
        put("BACKEND_BLOCK_SIZES", {ours: getattr(sizes[0], "base", sizes[0])})
        _make_in_the_models_dtype(backend.get_impl_cls(), monkeypatch)
        run = module.run_attention_backend

        def run_one(member: Any, spec: Any, layers: list[str], config: Any, *rest: Any, **options: Any) -> Any:
            request.node.user_properties.append(("reached", True))
            if name in DENSE:
                _register(backend, layers, config, options)
            return run(member, spec, layers, config, *rest, **options)

        put("run_attention_backend", run_one)
        if name in DENSE:
            check = module._test_backend_correctness

            def check_one(batch_spec: Any, model: str, backend_to_test: list[Any], *rest: Any, **options: Any) -> None:
                if ours in backend_to_test:
                    check(batch_spec, model, [ours], *rest, **options)

            put("_test_backend_correctness", check_one)

    @pytest.fixture
    def default_vllm_config(self) -> Iterator[Any]:
        from vllm.config import VllmConfig, set_current_vllm_config

        with set_current_vllm_config(config := VllmConfig()):
            yield config

    @pytest.fixture
    def dist_init(self, request: pytest.FixtureRequest, default_vllm_config: Any, tmp_path: Path) -> Iterator[None]:
        from vllm import distributed

        if not CUDA:
            request.getfixturevalue("one_process")
            yield
            return
        distributed.init_distributed_environment(1, 0, f"file://{tmp_path}/group", 0, backend="nccl")
        distributed.initialize_model_parallel(1)
        yield
        distributed.destroy_model_parallel()
        distributed.destroy_distributed_environment()

    @pytest.fixture
    def workspace_init(self) -> Iterator[None]:
        from vllm.v1.worker import workspace

        if CUDA:
            workspace.init_workspace_manager(torch.device("cuda:0"))
        yield
        workspace.reset_workspace_manager()


def renamed(names: Any, theirs: str, ours: str) -> Any:
    """Return a class with the members of an enum, in which the name `theirs` is the member `ours`."""
    members = {member.name: member for member in names}
    return type(names.__name__, (), {**members, theirs: members[ours]})


def _make_in_the_models_dtype(impl: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.config import get_current_vllm_config
    from vllm.utils.torch_utils import set_default_torch_dtype

    make = impl.__init__

    def init(self: Any, *layer: Any, **options: Any) -> None:
        with set_default_torch_dtype(get_current_vllm_config().model_config.dtype):
            make(self, *layer, **options)

    monkeypatch.setattr(impl, "__init__", init)


def _register(backend: Any, layers: list[str], config: Any, options: dict[str, Any]) -> None:
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

    model, heads = config.model_config, config.parallel_config
    layer = {name: options[name] for name in ("sliding_window", "attn_type", "kv_cache_dtype")}
    layer |= {"sinks": options["sinks"]} if options["sinks"] is not None else {}
    sizes = model.get_num_attention_heads(heads), model.get_head_size(), 1.0 / model.get_head_size() ** 0.5
    with set_current_vllm_config(config):
        impl = backend.get_impl_cls()(*sizes, num_kv_heads=model.get_num_kv_heads(heads), alibi_slopes=None, **layer)
    layer_of = type(
        "Layer", (AttentionLayerBase,), dict.fromkeys(AttentionLayerBase.__abstractmethods__) | {"impl": impl}
    )
    config.compilation_config.static_forward_context |= {name: layer_of() for name in layers}


def _run_on_the_cpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.nn.attention import flex_attention

    from tests.engines import vllm_prefill

    for fixture in ("vllm_flashinfer", "vllm_kernels"):
        request.getfixturevalue(fixture)
    vllm_prefill.install(monkeypatch)
    monkeypatch.setattr(request.module, "DEVICE_TYPE", "cpu")
    # The compiler of the tests' oracle has no CPU kernel for their masks.
    monkeypatch.setattr(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)

"""Linear layers inside vLLM over our kernels: their products, loading, reloading, compilation, and what is refused.

Needs vLLM's Python, which `make engines` unpacks, and TRITON_INTERPRET=1 for vLLM's own Triton kernels.
"""

from __future__ import annotations

import importlib
import pickle
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from attn_backends.engines import vllm as plug_in
from attn_backends.engines.vllm import compat
from attn_backends.engines.vllm.names import PLAIN, ROUNDED
from attn_backends.kernels.linear.fp8_weight import Fp8Weight
from tests.engines.vllm_runner import HEADS, KV_HEADS, NEEDS_VLLM, PAGE, TOKENS, default_dtype
from tests.factories import make_spec

pytestmark = NEEDS_VLLM
K, DIM = 64, 32
HALVES = {"q": HEADS * DIM, "k": KV_HEADS * DIM, "v": KV_HEADS * DIM}
SHARDS = {"replicated": {None: 80}, "row": {None: 80}, "column": {None: 80}, "merged": {0: 48, 1: 48}, "qkv": HALVES}
"""Outputs of each part of a layer that its checkpoint stores separately."""


@pytest.fixture
def config(one_process):
    from vllm.config import set_current_vllm_config

    from engine_kits.vllm.config import config_of

    made = config_of(make_spec(num_q_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=DIM, page_size=PAGE), TOKENS)
    with set_current_vllm_config(made), torch.no_grad():
        yield made


def quantization(name):
    from vllm.model_executor.layers.quantization import get_quantization_config

    return get_quantization_config(name)()


def make(kind, name, dtype=torch.bfloat16, **options):
    """Make a layer as vLLM's models do."""
    from vllm.model_executor.layers import linear

    options = {"bias": True, "params_dtype": dtype, "prefix": "layer", "return_bias": False} | options
    made = {
        "replicated": (linear.ReplicatedLinear, (K, 80)),
        "row": (linear.RowParallelLinear, (K, 80)),
        "column": (linear.ColumnParallelLinear, (K, 80)),
        "merged": (linear.MergedColumnParallelLinear, (K, [48, 48])),
        "qkv": (linear.QKVParallelLinear, (K, DIM, HEADS, KV_HEADS)),
    }
    of, sizes = made[kind]
    with default_dtype(dtype):
        return of(*sizes, quant_config=quantization(name), **options)


def load(layer, kind, seed=0):
    """Load random parts as a checkpoint's, as vLLM's loader does, and return weight and bias in fp32."""
    chance = torch.Generator().manual_seed(seed)
    weights, biases = [], []
    for part, outputs in SHARDS[kind].items():
        weights.append(torch.randn(outputs, K, generator=chance).bfloat16())
        biases.append(torch.randn(outputs, generator=chance).bfloat16())
        for parameter, tensor in ((layer.bias, biases[-1]), (layer.weight, weights[-1])):
            if parameter is not None:
                parameter.weight_loader(parameter, tensor, *([] if part is None else [part]))
    return torch.cat(weights).float(), torch.cat(biases).float()


def process(layer):
    """Do what vLLM does with every layer after loading."""
    from vllm.config import get_current_vllm_config
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload
    from vllm.model_executor.model_loader.utils import process_weights_after_loading

    model, of = torch.nn.ModuleList([layer]), get_current_vllm_config().model_config
    finalize_layerwise_reload(model, of)
    process_weights_after_loading(model, of, torch.device("cpu"))


def rows(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(7)).bfloat16()


def assert_multiplies(layer, weight, bias, *, name, shape=(5, K)):
    x = rows(*shape)
    if name == ROUNDED:
        rounded = Fp8Weight.of(weight.bfloat16())
        assert torch.equal(layer.weight.view(torch.uint8), rounded.values.view(torch.uint8))
        weight = rounded.widened(torch.float32)
    expected = (x.double() @ weight.double().T + (0 if bias is None else bias.double())).float()
    torch.testing.assert_close(layer(x).float(), expected, rtol=2**-8, atol=2**-6)


@pytest.mark.parametrize("name", [PLAIN, ROUNDED])
@pytest.mark.parametrize("kind", SHARDS)
def test_a_layer_multiplies_by_what_its_checkpoint_stores(kind, name, config):
    layer = make(kind, name)
    weight, bias = load(layer, kind)
    process(layer)
    assert_multiplies(layer, weight, bias, name=name)
    assert layer.weight.dtype == (torch.float8_e4m3fn if name == ROUNDED else torch.bfloat16)
    assert_multiplies(layer, weight, bias, name=name, shape=(2, 3, K))


@pytest.mark.parametrize("name", [PLAIN, ROUNDED])
def test_parts_of_a_row_parallel_layer_add_up_to_the_whole(name, config, monkeypatch):
    """Each rank has a scale of its own for each output."""
    from vllm.model_executor import parameter
    from vllm.model_executor.layers import linear

    found, x = 0, rows(5, K)
    for rank in (0, 1):
        for module in (linear, parameter):
            monkeypatch.setattr(module, "get_tensor_model_parallel_world_size", lambda: 2)
            monkeypatch.setattr(module, "get_tensor_model_parallel_rank", lambda rank=rank: rank)
        layer = make("row", name, bias=False, reduce_results=False)
        weight, _ = load(layer, "row")
        process(layer)
        assert_multiplies(layer, weight[:, rank * K // 2 :][:, : K // 2], None, name=name, shape=(5, K // 2))
        found += layer(x[:, rank * K // 2 :][:, : K // 2]).double()
    torch.testing.assert_close(found, x.double() @ weight.double().T, rtol=0, atol=1.0 if name == ROUNDED else 2**-3)


@pytest.mark.parametrize("name", [PLAIN, ROUNDED])
def test_reloaded_weights_replace_the_old_ones_where_graphs_read_them(name, config):
    from vllm.model_executor.model_loader import reload

    layer = make("qkv", name)
    model = torch.nn.ModuleList([layer])
    reload.record_metadata_for_reloading(model)
    load(layer, "qkv")
    process(layer)
    before = {key: value.data_ptr() for key, value in layer.named_parameters()}
    assert ("weight_scale" in before) is (name == ROUNDED)
    reload.initialize_layerwise_reload(model)
    weight, bias = load(layer, "qkv", seed=1)
    reload.finalize_layerwise_reload(model, config.model_config)
    assert {key: value.data_ptr() for key, value in layer.named_parameters()} == before
    assert_multiplies(layer, weight, bias, name=name)


@pytest.mark.parametrize("name", [PLAIN, ROUNDED])
def test_a_compiler_traces_a_layer_once_for_any_number_of_rows(name, config):
    layer = make("merged", name)
    load(layer, "merged")
    process(layer)
    counter = CompileCounter()
    compiled = torch.compile(lambda x: layer(x) * 2, backend=counter, fullgraph=True, dynamic=True)
    for count in (3, 70, 200):
        x = rows(count, K)
        assert torch.equal(compiled(x), layer(x) * 2)
    assert counter.frame_count == 1


@pytest.mark.parametrize("name", [PLAIN, ROUNDED])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("kind", ["qkv", "row", "head"])
def test_loading_compiles_what_a_layer_multiplies(kind, has_bias, name, config, monkeypatch):
    """With its bias and without, which one of several ranks adds."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    from attn_backends.engines.vllm import linear_methods

    def described(x, *parts):
        """What kernels are compiled for."""
        return x.dtype, x.shape[1:], *(None if part is None else part.data_ptr() for part in parts)

    warm, multiplied = [], []
    monkeypatch.setattr(linear_methods, "warm_up", lambda op, product: warm.append((op, *described(*product))))
    monkeypatch.setattr(linear_methods, "multiply", lambda *parts: multiplied.append(described(*parts)))
    if kind == "head":
        with default_dtype(torch.bfloat16):
            layer = ParallelLMHead(128, K, bias=has_bias, quant_config=quantization(name), prefix="head")
    else:
        layer = make(kind, name, bias=has_bias)
        load(layer, kind)
    process(layer)
    for bias in {None, layer.bias}:
        layer.quant_method.apply(layer, rows(5, K), bias)
    assert len(warm) == 1 + has_bias
    assert set(warm) == {(linear_methods.linear_op, *parts) for parts in multiplied}


def test_other_layers_stay_vllms(config, monkeypatch):
    from vllm.model_executor.layers import linear, vocab_parallel_embedding

    from attn_backends.engines.vllm import linear_methods

    assert type(make("replicated", PLAIN, torch.float32).quant_method) is linear.UnquantizedLinearMethod
    with default_dtype(torch.bfloat16):
        embedding = vocab_parallel_embedding.VocabParallelEmbedding(128, K, quant_config=quantization(ROUNDED))
    assert type(embedding.quant_method) is vocab_parallel_embedding.UnquantizedEmbeddingMethod

    said = []
    log = SimpleNamespace(warning_once=lambda text, *args: said.append(text % args))
    monkeypatch.setattr(linear_methods, "_log", log)
    experts = linear_methods.RoutedExperts.__new__(linear_methods.RoutedExperts)
    assert [quantization(name).get_quant_method(experts, "experts") for name in (PLAIN, ROUNDED)] == [None, None]
    assert said == [f"{ROUNDED} leaves the weights of experts in 16 bits."]


def test_a_head_multiplies_in_16_bits(config, monkeypatch):
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    from attn_backends.engines.vllm import linear_methods

    with default_dtype(torch.bfloat16):
        head = ParallelLMHead(128, K, quant_config=quantization(ROUNDED), prefix="head")
    head.weight.data.copy_(rows(128, K))
    process(head)
    x, seen, multiply = rows(3, K), [], linear_methods.multiply
    monkeypatch.setattr(linear_methods, "multiply", lambda *given: seen.append(given) or multiply(*given))
    found = head.quant_method.apply(head, x)
    torch.testing.assert_close(found.double(), x.double() @ head.weight.double().T, rtol=2**-8, atol=2**-6)
    assert len(seen) == 1


@pytest.mark.parametrize(
    ("place", "option", "value", "reason"),
    [
        ("config", "lora_config", object(), "LoRA is on, and .* Start without --enable-lora"),
        ("vllm.envs", "VLLM_BATCH_INVARIANT", True, "INVARIANT is set, and .* rows. Unset it"),
        ("kernels", "linear_backend", "cutlass", "backend is cutlass, and .* Leave it out"),
        (
            f"{plug_in.__name__}.linear_methods",
            "current_platform",
            SimpleNamespace(is_cuda=bool),
            "no CUDA GPU, and .* Leave the quant",
        ),
    ],
)
@pytest.mark.parametrize("name", [PLAIN, ROUNDED])
def test_options_that_the_kernels_do_not_serve_are_refused(name, place, option, value, reason, config, monkeypatch):
    of = {"config": config, "kernels": config.kernel_config}.get(place) or importlib.import_module(place)
    monkeypatch.setattr(of, option, value, raising=False)
    with pytest.raises(ValueError, match=rf"'{name}' does not serve .* vLLM was not started:\n- .*{reason}"):
        make("replicated", name)


@pytest.mark.parametrize(
    ("name", "dtype", "capability", "reason"),
    [
        (PLAIN, torch.float32, 90, "torch.float32 is not supported for quantization method attn_backends"),
        (PLAIN, torch.bfloat16, 75, "Minimum capability: 80. Current capability: 75"),
        (ROUNDED, torch.float16, 86, "Minimum capability: 89. Current capability: 86"),
    ],
)
def test_vllm_refuses_a_dtype_or_a_device(name, dtype, capability, reason, config, monkeypatch, tmp_path):
    from vllm.config import VllmConfig
    from vllm.platforms import current_platform
    from vllm.platforms.interface import DeviceCapability

    monkeypatch.setattr(
        type(current_platform), "get_device_capability", lambda self=None: DeviceCapability(*divmod(capability, 10))
    )
    monkeypatch.setattr(config.model_config, "quantization", name)
    monkeypatch.setattr(config.model_config, "dtype", dtype)
    monkeypatch.setattr(config.model_config, "model", str(tmp_path))
    with pytest.raises(ValueError, match=reason):
        VllmConfig.get_quantization_config(config.model_config, config.load_config)


def test_a_spawned_process_reads_the_configuration_and_no_checkpoint_names_it(config):
    ours = quantization(ROUNDED)
    assert type(pickle.loads(pickle.dumps(ours))) is type(ours)
    with pytest.raises(ValueError, match="attn_backends_fp8 reads 16-bit checkpoints only"):
        ours.from_config({"quant_method": ROUNDED})


def test_another_vllm_starts_without_the_names(monkeypatch, capsys):
    other = ModuleType("vllm")
    other.__version__ = "0.34.0"
    monkeypatch.setitem(sys.modules, "vllm", other)
    monkeypatch.delitem(sys.modules, f"{plug_in.__name__}.quantization", raising=False)
    compat._installed.cache_clear()
    plug_in._register_quantizations()
    compat._installed.cache_clear()
    assert (
        "registered no quantization: attn-backends' adapters are for vLLM 0.33, got 0.34.0" in capsys.readouterr().err
    )

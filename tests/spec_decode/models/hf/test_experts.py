"""Experts of `transformers` models in this library's grouped products, compared with the library's own functions."""

import json

import pytest
import torch
from torch.nn import functional as F

from attn_backends import get
from spec_decode.engine import Engine
from spec_decode.graphs import CaptureError, runtime_for
from spec_decode.llm import LLM
from spec_decode.models import CheckpointError, TransformersTarget
from spec_decode.models.hf import experts
from spec_decode.models.hf.experts import EXPERTS_NAME, serve_experts
from spec_decode.paged import GraphMode
from tests.factories import CPU, engine_config, make_request
from tests.spec_decode.engine.hybrid_helpers import FAMILIES, NEW, PROMPTS, VOCAB, make_model, transformers, wanted
from tests.spec_decode.llm.test_published import write_tokenizer

moe = pytest.importorskip("transformers.integrations.moe")
GPU = torch.device("cuda")
WITH_EXPERTS = [family for family, fields in FAMILIES.items() if "experts_implementation" in fields]


@pytest.mark.parametrize("family", WITH_EXPERTS)
def test_captured_model_matches_transformers(family, monkeypatch):
    model, text, texts = make_model(family), torch.tensor([PROMPTS[-1]]), wanted(family)
    own = model(text).logits
    assert serve_experts(model, GPU)
    monkeypatch.setattr(F, "grouped_mm", None, raising=False)
    torch.testing.assert_close(model(text).logits, own, rtol=0, atol=1e-5)
    config = engine_config(
        max_num_seqs=3, max_model_len=48, page_size=4, num_speculative_tokens=0, graph_mode=GraphMode.FULL
    )
    engine = Engine(TransformersTarget(model), None, get("torch_reference"), config)
    asked = [make_request(prompt=prompt, max_tokens=NEW) for prompt in PROMPTS]
    assert [found.token_ids for found in engine.generate(asked)] == texts


def test_loop_over_experts_cannot_be_captured():
    model = make_model("Qwen3NextConfig")
    model.set_experts_implementation("eager")
    layer, inputs = model.model.layers[0].mlp.experts, (torch.ones(1, 32), torch.tensor([[0, 1]]), torch.ones(1, 2))
    with pytest.raises(CaptureError, match="depends on device data"):
        runtime_for(CPU).capture(lambda: layer(*inputs))


def make_layer(act=F.silu, *, gate=True, apply_gate=None, dtype=torch.float32, **flags):
    """A layer of four experts with biases."""

    class Layer(torch.nn.Module):
        def __init__(self, config):
            super().__init__()
            self.num_experts, self.act_fn = 4, act
            name, width = ("gate_up_proj", 12) if gate else ("up_proj", 6)
            sizes = {name: (width, 8), f"{name}_bias": (width,), "down_proj": (8, 6), "down_proj_bias": (8,)}
            for each, size in sizes.items():
                setattr(self, each, torch.nn.Parameter(torch.randn(4, *size).to(dtype), requires_grad=False))

        def forward(self, *_):
            raise NotImplementedError

    if apply_gate is not None:
        Layer._apply_gate = apply_gate
    torch.manual_seed(0)
    config = transformers.PretrainedConfig(experts_implementation="grouped_mm")
    return moe.use_experts_implementation(Layer, has_bias=True, has_gate=gate, **flags)(config)


class OneLayer(torch.nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def set_experts_implementation(self, name):
        self.layer.config._experts_implementation = name


def clamped(self, gate_up):
    gate, up = gate_up[..., ::2].clamp(max=7), gate_up[..., 1::2].clamp(-7, 7)
    return gate * torch.sigmoid(1.7 * gate) * (up + 1)


LAYERS = {
    "silu": {},
    "silu in bfloat16": {"dtype": torch.bfloat16},
    "silu in float16": {"dtype": torch.float16},
    "gelu": {"act": F.gelu},
    "interleaved and clamped": {"apply_gate": clamped},
    "no gate": {"act": F.relu, "gate": False},
}


@pytest.mark.parametrize("kind", LAYERS)
def test_layer_matches_gathered_weights(kind):
    layer, generator = make_layer(**LAYERS[kind]), torch.Generator().manual_seed(1)
    dtype = layer.down_proj.dtype
    assert serve_experts(OneLayer(layer), GPU) and layer.is_swiglu == kind.startswith("silu")
    hidden, weights = torch.randn(9, 8, generator=generator).to(dtype), torch.rand(9, 2, generator=generator).to(dtype)
    chosen = torch.randint(0, 4, (9, 2), generator=generator)
    found = layer(hidden, chosen, weights)
    exact = moe.batched_mm_experts_forward(layer.float(), hidden.float(), chosen, weights.float())
    assert found.dtype is dtype and (found - exact).abs().max() <= 8 * torch.finfo(dtype).eps * exact.abs().max()


MUTANTS = {
    "order of weights": ("order_by_expert", lambda own: lambda experts, count: own((experts + 1) % count, count)),
    "order of rows": ("combine_experts", lambda own: lambda rows, w, places, _: own(rows, w, places.flip(1), None)),
    "routing weights": ("combine_experts", lambda own: lambda rows, w, places, _: own(rows, w * 0 + 1, places, None)),
    "inner bias": ("grouped_gated_linear", lambda own: lambda *args, bias: own(*args)),
    "outer bias": ("grouped_linear", lambda own: lambda rows, weight, ends, bias: own(rows, weight, ends)),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_wrong_experts_are_not_served(mutant, monkeypatch):
    name, change = MUTANTS[mutant]
    monkeypatch.setattr(experts, name, change(getattr(experts, name)))
    assert not serve_experts(OneLayer(make_layer()), GPU)


UNSERVED = {
    "transposed": lambda: make_layer(is_transposed=True),
    "several devices": lambda: setattr(layer := make_layer(), "_is_expert_parallel", True) or layer,
    "Error": lambda: make_layer(dtype=torch.float8_e4m3fn),
    "AttributeError": lambda: delattr(layer := make_layer(), "gate_up_proj") or layer,
}


@pytest.mark.parametrize("reason", UNSERVED)
def test_other_layers_keep_their_own_function(reason):
    model = OneLayer(UNSERVED[reason]())
    assert not serve_experts(model, GPU) and model.layer.config._experts_implementation == "grouped_mm"
    model.set_experts_implementation(EXPERTS_NAME)
    with pytest.raises(CheckpointError, match=rf"cannot compute layer \(Layer\): .*{reason}.* Remove it"):
        serve_experts(model, CPU)


def test_only_default_on_a_gpu_is_replaced(tmp_path):
    model = make_model("Lfm2MoeConfig")
    assert not serve_experts(model, CPU) and not serve_experts(make_model("Lfm2Config"), GPU)
    model.set_experts_implementation("batched_mm")
    assert not serve_experts(model, GPU) and model.config._experts_implementation == "batched_mm"
    write_tokenizer(tmp_path, ["<end>", *(f"w{i}" for i in range(VOCAB - 1))])
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for chosen, words in (("batched_mm", ""), (EXPERTS_NAME, ", its experts in this library's kernels")):
        (tmp_path / "config.json").write_text(json.dumps(config | {"experts_implementation": chosen}))
        assert LLM(tmp_path, device="cpu").explain().startswith(f"target runs in transformers{words}: ")

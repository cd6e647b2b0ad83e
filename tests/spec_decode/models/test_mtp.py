"""Multi-token prediction as published: its sizes, `transformers` layers, and forms of its tensors."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from attn_backends import Accepted, get
from builders import AttentionKind
from spec_decode.models.checkpoints.config_reader import ConfigReader
from spec_decode.models.checkpoints.files import CheckpointError
from spec_decode.models.layers.grouped_attention import read_grouped_shape
from spec_decode.models.layers.mla_attention import read_mla_shape
from spec_decode.models.layers.rope import read_latent_rope
from spec_decode.models.layers.window_attention import read_window_shape
from spec_decode.models.load import load_draft
from tests.factories import CPU
from tests.spec_decode.models import oracle
from tests.spec_decode.models.generated import GATED, Generated, StubTarget
from tests.spec_decode.models.generated_mtp import (
    GLM_CONFIG,
    GLM_FLASH_CONFIG,
    HIDDEN,
    LAYER,
    MIMO_CONFIG,
    QWEN_MOE_CONFIG,
    QWEN_TEXT,
    SIZES,
    V3_CONFIG,
    V4_CONFIG,
    VOCAB,
    make_mtp,
)

TARGET = StubTarget(vocab_size=VOCAB)


def load(folder, target=TARGET):
    return load_draft(folder, target, dtype=torch.float32)


def assert_same_parameters(model, other):
    found, wanted = model.state_dict(), other.state_dict()
    assert found.keys() == wanted.keys() and all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


AS_PUBLISHED = {
    "glm_flash": (
        {**GLM_FLASH_CONFIG, "num_attention_heads": 20, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
         "qk_nope_head_dim": 192, "v_head_dim": 256, "max_position_embeddings": 202752},
        lambda config: read_mla_shape(config, HIDDEN, 1e-5),
        "triton_mla",
        {"kind": AttentionKind.MLA, "num_q_heads": 20, "head_dim": 576, "out_dim": 512, "softmax_scale": 256**-0.5},
    ),
    "deepseek_v4": (
        {**V4_CONFIG, "num_attention_heads": 64, "head_dim": 512, "qk_rope_head_dim": 64, "sliding_window": 128,
         "o_groups": 8, "o_lora_rank": 1024, "q_lora_rank": 1024},
        lambda config: read_window_shape(config, HIDDEN, 1e-6),
        "sparse_swa_mla",
        {"head_dim": 512, "out_dim": 512, "sliding_window": 128, "softmax_scale": 512**-0.5},
    ),
    "qwen": (
        {**QWEN_TEXT, "hidden_size": 5120, "num_attention_heads": 24, "num_key_value_heads": 4, "head_dim": 256},
        lambda config: read_grouped_shape(config, 1e-6, qk_norm=True, gated=True, norm_offset=1.0, rotated=0.25),
        "triton_paged",
        {"kind": AttentionKind.MHA, "num_q_heads": 24, "num_kv_heads": 4, "head_dim": 256},
    ),
}  # fmt: skip


@pytest.mark.parametrize(("config", "read", "backend", "wanted"), AS_PUBLISHED.values(), ids=AS_PUBLISHED)
def test_published_sizes_give_published_attention(config, read, backend, wanted):
    spec = read(ConfigReader(config, "config.json")).spec(64, torch.bfloat16)
    assert {field: getattr(spec, field) for field in wanted} == wanted
    assert isinstance(get(backend).supports(spec, CPU), Accepted)


def test_deepseek_yarn_scaling_keeps_size_and_raises_scale():
    scaling = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1,
               "mscale": 1.0, "mscale_all_dim": 1.0}  # fmt: skip
    rope = read_latent_rope(ConfigReader({"rope_theta": 10000, "rope_scaling": scaling}, "config.json"), 64)
    assert rope.scaling.amplitude == 1.0 and rope.scaling.softmax_factor == pytest.approx(1.3688879454**2)
    # The first ten pairs turn often enough in 4096 tokens to stay, those from the 23rd on are stretched whole.
    ratio = torch.atan2(rope.table(2)[1, 32:], rope.table(2)[1, :32]).double() / 10000 ** (-torch.arange(32) / 32)
    torch.testing.assert_close(ratio[:11], torch.ones(11).double(), rtol=1e-5, atol=0)
    torch.testing.assert_close(ratio[23:], torch.full((9,), 1 / 40).double(), rtol=1e-3, atol=0)


def inputs_of(rotary):
    """Tokens and states of a text; and what a layer of `transformers` is told of it."""
    generator = torch.Generator().manual_seed(1)
    ids, hidden = torch.randint(0, VOCAB, (9,), generator=generator), torch.randn(9, HIDDEN, generator=generator)
    mask, places = torch.full((9, 9), -torch.inf).triu(1)[None, None], torch.arange(9)[None]
    arguments = {"attention_mask": mask, "position_ids": places, "position_embeddings": rotary(hidden[None], places)}
    return ids, hidden, arguments


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
def test_oracle_layer_matches_transformers(family):
    transformers = pytest.importorskip("transformers")
    layers = pytest.importorskip("transformers.modeling_layers")
    if not hasattr(layers, "MtpLayer"):
        pytest.skip("this release of transformers has no layer for it")
    import transformers.models.deepseek_v3.modeling_deepseek_v3 as deepseek
    import transformers.models.glm4_moe.modeling_glm4_moe as glm

    rope = {"rope_type": "default", "rope_theta": 500.0}
    if family == "deepseek_v3":
        fields = {name: value for name, value in V3_CONFIG.items() if not name.startswith("rope")}
        fields |= {"n_routed_experts": None, "rope_parameters": rope}
        config = transformers.DeepseekV3Config(**fields | {"n_routed_experts": 8, "first_k_dense_replace": LAYER + 1})
        kind, parts, of = "DeepseekV3", deepseek, oracle.DeepseekV3
    else:
        fields = {**GLM_CONFIG, "rope_parameters": {**rope, "partial_rotary_factor": 0.5}}
        config, kind, parts, of = transformers.Glm4MoeConfig(**fields), "Glm4Moe", glm, oracle.Prediction
    config._attn_implementation, config._experts_implementation = "eager", "eager"
    norm, decoder, rotary = (getattr(parts, f"{kind}{part}") for part in ("RMSNorm", "DecoderLayer", "RotaryEmbedding"))
    layer, checkpoint = layers.MtpLayer(config, decoder, norm, 1), make_mtp(fields)
    own = {name.removeprefix(f"model.layers.{LAYER}."): tensor for name, tensor in checkpoint.tensors.items()}
    own = {name: t.contiguous() for name, t in (fused_experts(own) if family == "glm4_moe" else own).items()}
    state = {name: own.pop(name) for name in ("enorm.weight", "hnorm.weight", "eh_proj.weight")}
    state["post_norm.weight"] = own.pop("shared_head.norm.weight")
    layer.load_state_dict(state | {f"mtp_block.{name}": tensor for name, tensor in own.items()})
    ids, hidden, arguments = inputs_of(rotary(config))
    angles, mask, places = arguments["position_embeddings"], arguments["attention_mask"], arguments["position_ids"]
    found = layer(TARGET.embed(ids)[None], hidden[None], angles, mask, places, None)[0]
    wanted = of(checkpoint, TARGET, [None], torch.float64).states(ids, hidden.double())
    torch.testing.assert_close(found.double(), wanted, rtol=2e-4, atol=2e-5)


def test_mimo_block_matches_qwen2_of_transformers():
    transformers = pytest.importorskip("transformers")
    from transformers.models.qwen2 import modeling_qwen2 as qwen2

    config = transformers.Qwen2Config(**SIZES, rope_parameters={"rope_type": "default", "rope_theta": 640000.0})
    config._attn_implementation = "eager"
    published = oracle.MiMo(make_mtp(MIMO_CONFIG), TARGET, [None], torch.float64)
    layer = qwen2.Qwen2DecoderLayer(config, 0)
    layer.load_state_dict({name: published.tensors[name].float() for name in layer.state_dict()})
    _, x, arguments = inputs_of(qwen2.Qwen2RotaryEmbedding(config))
    found = layer(x[None], **arguments)
    wanted = published.layer("", published.norm("input_layernorm", x.double()), x.double(), None)
    found = found[0] if isinstance(found, tuple) else found.view(9, -1)
    torch.testing.assert_close(found.double(), wanted, rtol=2e-4, atol=2e-5)


def fused_experts(tensors):
    """The experts' tensors stacked, gate above up."""
    prefix = next(name for name in tensors if ".experts." in name).partition("experts.")[0]
    gate, up, down = (
        torch.stack([tensors[f"{prefix}experts.{expert}.{part}.weight"] for expert in range(8)]) for part in GATED
    )
    stacked = {f"{prefix}experts.gate_up_proj": torch.cat([gate, up], 1), f"{prefix}experts.down_proj": down}
    return {name: tensor for name, tensor in tensors.items() if ".experts." not in name} | stacked


def test_fused_expert_tensor_loads_like_separate_ones(tmp_path):
    many = make_mtp(QWEN_MOE_CONFIG)
    one = Generated(many.config, fused_experts(many.tensors))
    assert_same_parameters(load(one.write(tmp_path / "one")), load(many.write(tmp_path / "many")))


def test_qwen3_next_config_needs_no_layer_count(tmp_path):
    counted = make_mtp(QWEN_MOE_CONFIG)
    published = counted.changed(without=["mtp_num_hidden_layers"])
    assert_same_parameters(load(published.write(tmp_path / "published")), load(counted.write(tmp_path / "counted")))


def test_target_without_its_layer_is_refused(tmp_path):
    whole = make_mtp(QWEN_MOE_CONFIG)
    alone = Generated(whole.config, {"model.norm.weight": next(iter(whole.tensors.values()))})
    with pytest.raises(CheckpointError, match=r"has no tensors mtp\.\*, the layer that drafts"):
        load(alone.write(tmp_path))


FOLDERS = Path(__file__).parent / "speculators_drafts"
RENAMED = {
    "input_proj.weight": "mtp.fc.weight",
    "final_layernorm.weight": "mtp.norm.weight",
    "hidden_layernorm.weight": "mtp.pre_fc_norm_hidden.weight",
    "token_layernorm.weight": "mtp.pre_fc_norm_embedding.weight",
}
"""What Qwen calls the tensors that speculators trains on."""


@pytest.mark.parametrize("name", ["mtp_qwen3_5", "mtp_qwen3_5_moe", "mtp_qwen3_next"])
def test_speculators_checkpoint_loads_like_published_layer(name, tmp_path):
    own = {n.removeprefix("mtp_layers.0."): t for n, t in load_file(FOLDERS / name / "model.safetensors").items()}
    config = json.loads((FOLDERS / name / "config.json").read_text())["transformer_layer_config"]
    published = Generated(
        {"architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": {**config, "mtp_num_hidden_layers": 1}},
        {RENAMED.get(n, f"mtp.layers.0.{n}"): tensor for n, tensor in own.items()},
    )
    target = StubTarget(vocab_size=config["vocab_size"], hidden_size=config["hidden_size"])
    assert_same_parameters(load(published.write(tmp_path), target), load(FOLDERS / name, target))

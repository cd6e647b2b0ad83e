"""Multi-token prediction over grouped heads, as four publishers lay it out, against the layer's definition in fp64."""

import json
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from attn_backends import Accepted, get
from builders import AttentionKind
from spec_decode.drafter import Strategy
from spec_decode.engine import Engine
from spec_decode.models import CheckpointError
from spec_decode.models.grouped_mtp import GroupedPrediction
from spec_decode.models.load import load_draft
from spec_decode.models.mtp_draft import MtpModules
from spec_decode.paged import GraphMode
from tests.factories import CPU, engine_config, make_request
from tests.spec_decode.models.generated_mtp import (
    HIDDEN,
    LAYER,
    VOCAB,
    DraftFixture,
    StubTarget,
    assert_drafts_are_those_of_eager,
    assert_drafts_are_those_without_a_cache,
    assert_pieces_say_what_whole_texts_say,
    close,
    write,
)
from tests.spec_decode.models.grouped_mtp_oracle import (
    GLM_CONFIG,
    MIMO_CONFIG,
    QWEN_CONFIG,
    QWEN_MOE_CONFIG,
    QWEN_TEXT,
    SIZES,
    GroupedOracle,
    grouped_modules,
    grouped_tensors,
)

TARGET = StubTarget()
WHOLE = {**QWEN_TEXT, "rope_parameters": {"rope_theta": 300.0, "partial_rotary_factor": 1.0}}
FORMS = {
    "qwen": (QWEN_CONFIG, {}),
    "qwen_whole_heads": ({**WHOLE, "architectures": ["Qwen3_5ForCausalLM"]}, {}),
    "qwen_mixture": (QWEN_MOE_CONFIG, {}),
    "mimo": (MIMO_CONFIG, {}),
    "glm": (GLM_CONFIG, {}),
    "glm_with_embedding_and_head": (GLM_CONFIG, {"own": True}),
}
FOLDERS = Path(__file__).parent / "speculators_drafts"


def load(folder, target=TARGET, dtype=torch.float32):
    return load_draft(folder, target, dtype=dtype)


@pytest.fixture(params=FORMS.values(), ids=FORMS)
def form(request, tmp_path):
    config, options = request.param
    tensors = grouped_tensors(config, **options)
    return load(write(tmp_path, config, tensors)), GroupedOracle(config, tensors, TARGET)


def test_prefill_and_continuation_say_what_the_whole_text_says(form):
    assert_pieces_say_what_whole_texts_say(*form, [11, 7], [6, 5])


def test_the_drafter_drafts_what_the_draft_without_a_cache_drafts(form):
    assert_drafts_are_those_without_a_cache(*form)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("strategy", [Strategy.DEVICE_LOOP, Strategy.FULL_LOOP, Strategy.PER_STEP])
@pytest.mark.parametrize("config", [QWEN_MOE_CONFIG, GLM_CONFIG], ids=["qwen", "glm"])
def test_every_strategy_that_captures_the_step_drafts_what_eager_drafts(tmp_path, config, strategy, temperature):
    assert_drafts_are_those_of_eager(load(write(tmp_path, config, grouped_tensors(config))), strategy, temperature)


def test_of_glms_layers_each_drafts_a_token(tmp_path):
    config = {**GLM_CONFIG, "num_nextn_predict_layers": 2}
    tensors = grouped_modules(config)
    model = load(write(tmp_path, config, tensors))
    assert type(model) is MtpModules
    generator = torch.Generator().manual_seed(0)
    ids, hidden = torch.randint(0, VOCAB, (7,), generator=generator), torch.randn(7, HIDDEN, generator=generator)
    for index, module in enumerate(model.prediction_modules):
        found = DraftFixture(module).run([5, 2], [5, 2], ids, hidden)
        oracle = GroupedOracle(config, tensors, TARGET, index)
        close(found, torch.cat([oracle.states(ids[part], hidden[part]) for part in (slice(5), slice(5, 7))]))


def test_experts_in_one_tensor_are_those_in_many(tmp_path):
    models = []
    for fused in (False, True):
        (folder := tmp_path / str(fused)).mkdir()
        models.append(load(write(folder, QWEN_MOE_CONFIG, grouped_tensors(QWEN_MOE_CONFIG, fused=fused))))
    one, many = (model.state_dict() for model in models)
    assert one.keys() == many.keys() and all(torch.equal(one[name], tensor) for name, tensor in many.items())


RENAMED = {
    "input_proj.weight": "mtp.fc.weight",
    "final_layernorm.weight": "mtp.norm.weight",
    "hidden_layernorm.weight": "mtp.pre_fc_norm_hidden.weight",
    "token_layernorm.weight": "mtp.pre_fc_norm_embedding.weight",
}
"""What Qwen calls the tensors that speculators trains on."""


@pytest.mark.parametrize("name", ["mtp_qwen3_5", "mtp_qwen3_5_moe", "mtp_qwen3_next"])
def test_what_speculators_saved_is_the_layer_that_qwen_published(name, tmp_path):
    own = {n.removeprefix("mtp_layers.0."): t for n, t in load_file(FOLDERS / name / "model.safetensors").items()}
    save_file({RENAMED.get(n, f"mtp.layers.0.{n}"): t for n, t in own.items()}, tmp_path / "model.safetensors")
    config = json.loads((FOLDERS / name / "config.json").read_text())["transformer_layer_config"]
    published = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "text_config": {**config, "mtp_num_hidden_layers": 1},
    }
    (tmp_path / "config.json").write_text(json.dumps(published))
    target = StubTarget(vocab_size=config["vocab_size"], hidden_size=config["hidden_size"])
    saved, found = load(FOLDERS / name, target).state_dict(), load(tmp_path, target).state_dict()
    assert saved.keys() == found.keys() and all(torch.equal(found[n], tensor) for n, tensor in saved.items())


def test_glms_layer_is_that_of_transformers():
    transformers = pytest.importorskip("transformers")
    layers = pytest.importorskip("transformers.modeling_layers")
    if not hasattr(layers, "MtpLayer"):
        pytest.skip("this release of transformers has no layer for it")
    config = transformers.Glm4MoeConfig(**{**GLM_CONFIG, "rope_parameters": {
        "rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}})  # fmt: skip
    config._attn_implementation, config._experts_implementation = "eager", "eager"
    from transformers.models.glm4_moe import modeling_glm4_moe as glm

    layer = layers.MtpLayer(config, glm.Glm4MoeDecoderLayer, glm.Glm4MoeRMSNorm, 1)
    tensors = grouped_tensors(GLM_CONFIG)
    own = {name.removeprefix(f"model.layers.{LAYER}."): t for name, t in tensors.items()}
    outer = {"enorm.weight", "hnorm.weight", "eh_proj.weight"}
    state = {name: own[name] for name in outer} | {"post_norm.weight": own["shared_head.norm.weight"]}
    rest = {
        name: t
        for name, t in own.items()
        if name not in outer and "shared_head" not in name and ".experts." not in name
    }
    state |= {f"mtp_block.{name}": t for name, t in rest.items()}
    stacked = {
        part: torch.stack([own[f"mlp.experts.{i}.{part}.weight"] for i in range(8)])
        for part in ("gate_proj", "up_proj", "down_proj")
    }
    state["mtp_block.mlp.experts.gate_up_proj"] = torch.cat([stacked["gate_proj"], stacked["up_proj"]], 1)
    state["mtp_block.mlp.experts.down_proj"] = stacked["down_proj"]
    layer.load_state_dict(state)
    ids = torch.randint(0, VOCAB, (9,), generator=torch.Generator().manual_seed(1))
    hidden = torch.randn(9, HIDDEN, generator=torch.Generator().manual_seed(2))
    places = torch.arange(9)[None]
    rotary = glm.Glm4MoeRotaryEmbedding(config)
    with torch.no_grad():
        found = layer(
            TARGET.embed(ids)[None], hidden[None], rotary(hidden[None], places),
            torch.full((9, 9), -torch.inf).triu(1)[None, None], places, None,
        )  # fmt: skip
    close(found[0], GroupedOracle(GLM_CONFIG, tensors, TARGET).states(ids, hidden))


def test_a_text_with_glms_layer_in_its_targets_checkpoint_is_what_plain_decoding_says(tmp_path):
    transformers = pytest.importorskip("transformers")
    from spec_decode.models.hf.target import TransformersTarget

    torch.manual_seed(2)
    rope = {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}
    whole = transformers.Glm4MoeForCausalLM(transformers.Glm4MoeConfig(**GLM_CONFIG, rope_parameters=rope))
    for parameter in whole.parameters():
        parameter.data.mul_(1 if parameter.dim() == 1 else 8)
    whole.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors") | grouped_tensors(GLM_CONFIG)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    target = TransformersTarget(transformers.Glm4MoeForCausalLM.from_pretrained(tmp_path))
    draft = load(tmp_path, target)

    def texts(draft, steps):
        config = engine_config(
            num_speculative_tokens=steps, max_num_seqs=2, max_model_len=48, page_size=16, graph_mode=GraphMode.NONE
        )
        engine = Engine(target, draft, get("torch_reference"), config)
        requests = [make_request(prompt=prompt, max_tokens=12, seed=1) for prompt in ([1, 5, 9], [2], [7, 7, 3, 0])]
        return [generation.token_ids for generation in engine.generate(requests)]

    plain = texts(None, 0)
    assert texts(draft, 3) == plain and len({tuple(text) for text in plain}) == 3


def test_mimos_block_is_qwen2s_of_transformers():
    transformers = pytest.importorskip("transformers")
    from transformers.models.qwen2 import modeling_qwen2 as qwen2

    config = transformers.Qwen2Config(**SIZES, rope_parameters={"rope_type": "default", "rope_theta": 640000.0})
    config._attn_implementation = "eager"
    tensors = grouped_tensors(MIMO_CONFIG)
    oracle = GroupedOracle(MIMO_CONFIG, tensors, TARGET)
    layer = qwen2.Qwen2DecoderLayer(config, 0)
    layer.load_state_dict(
        {
            name: t.float()
            for name, t in oracle.block.items()
            if not name.startswith(("token", "hidden", "input_proj", "final"))
        }
    )
    x = torch.randn(9, HIDDEN, generator=torch.Generator().manual_seed(2))
    places = torch.arange(9)[None]
    with torch.no_grad():
        found = layer(
            x[None], attention_mask=torch.full((9, 9), -torch.inf).triu(1)[None, None], position_ids=places,
            position_embeddings=qwen2.Qwen2RotaryEmbedding(config)(x[None], places),
        )  # fmt: skip
    wide = x.double()
    wide = wide + oracle.attention(oracle.normed(wide, oracle.block["input_layernorm.weight"]))
    wide = wide + oracle.feed_forward(oracle.normed(wide, oracle.block["post_attention_layernorm.weight"]))
    close(found[0] if isinstance(found, tuple) else found.view(9, -1), wide)


def test_the_paged_kernels_take_the_layers_attention_as_published():
    config = {**QWEN_TEXT, "hidden_size": 5120, "num_attention_heads": 24, "num_key_value_heads": 4, "head_dim": 256}
    from spec_decode.models.checkpoints.config_reader import ConfigReader
    from spec_decode.models.layers.grouped_attention import read_grouped_shape

    shape = read_grouped_shape(
        ConfigReader(config, "config.json"), 1e-6, qk_norm=True, gated=True, norm_offset=1.0, rotated=0.25
    )
    spec = shape.spec(16, torch.bfloat16)
    assert (spec.kind, spec.num_q_heads, spec.num_kv_heads, spec.head_dim) == (AttentionKind.MHA, 24, 4, 256)
    assert isinstance(get("triton_paged").supports(spec, CPU), Accepted)


def test_a_bf16_draft_keeps_norms_around_one_in_fp32(tmp_path):
    target = StubTarget().bfloat16()
    model = load(write(tmp_path, QWEN_CONFIG, grouped_tensors(QWEN_CONFIG)), target, torch.bfloat16)
    wide = {name for name, parameter in model.named_parameters() if parameter.dtype == torch.float32}
    assert wide == {name for name, _ in model.named_parameters() if "norm" in name} and len(wide) == 7
    assert model.layer_groups(4)[0].spec.dtype == torch.bfloat16
    tokens = DraftFixture(model).drafts(None)[0][0]
    assert tokens.min() >= 0


def test_half_of_a_head_is_rotated_where_glm_does_not_say_it(tmp_path):
    config = {name: value for name, value in GLM_CONFIG.items() if name != "partial_rotary_factor"}
    assert load(write(tmp_path, config, grouped_tensors(config))).attention.shape.rope.dims == 6


PROBLEMS = {
    "a quarter of a head, where Qwen does not say it": (
        {name: value for name, value in QWEN_MOE_CONFIG.items() if name != "partial_rotary_factor"},
        {"rope_parameters": {"rope_theta": 300.0}},
        "2 to 12 dims to rotate, got 0.25 of 12",
    ),
    "no layer": (QWEN_CONFIG, {"mtp_num_hidden_layers": 0}, "mtp_num_hidden_layers in text_config in .* be 1, got 0"),
    "two of MiMo's": (MIMO_CONFIG, {"num_nextn_predict_layers": 2}, "num_nextn_predict_layers in .* must be 1, got 2"),
    "two of GLM's, and one is there": (GLM_CONFIG, {"num_nextn_predict_layers": 2}, "says, 2 from .* got 1"),
    "an activation": (GLM_CONFIG, {"hidden_act": "gelu"}, "hidden_act .* must be 'silu', got 'gelu'"),
    "no heads": (QWEN_CONFIG, {"num_attention_heads": None}, "text_config in .* must say num_attention_heads"),
    "heads that are no multiple": (MIMO_CONFIG, {"num_key_value_heads": 4}, "describes no attention: "),
    "an odd head": (MIMO_CONFIG, {"head_dim": 13}, "describes no attention: head_dim must be even"),
    "a part that is no part": (GLM_CONFIG, {"partial_rotary_factor": 1.5}, "2 to 12 dims to rotate, got 1.5 of 12"),
    "a part of odd dims": (GLM_CONFIG, {"partial_rotary_factor": 0.25}, "2 to 12 dims to rotate, got 0.25 of 12"),
    "another rotation": (MIMO_CONFIG, {"rope_scaling": {"rope_type": "yarn"}}, "rope_type in .* got 'yarn'"),
    "another vocabulary": (MIMO_CONFIG, {"vocab_size": VOCAB + 1}, f"vocab_size.* {VOCAB + 1} .*{VOCAB}"),
    "another width": (QWEN_CONFIG, {"hidden_size": HIDDEN + 2}, f"hidden_size.* {HIDDEN + 2} .*{HIDDEN}"),
    "a routing that is none": (QWEN_MOE_CONFIG, {"num_experts_per_tok": 9}, "1 to 8 of the experts .* got 9"),
    "no shared expert": (QWEN_MOE_CONFIG, {"shared_expert_intermediate_size": None}, "say shared_expert_intermediate"),
}


@pytest.mark.parametrize(("config", "changes", "message"), PROBLEMS.values(), ids=PROBLEMS)
def test_a_config_that_cannot_be_served_is_refused(tmp_path, config, changes, message):
    nested = "text_config" in config
    changed = {**config, "text_config": {**config["text_config"], **changes}} if nested else {**config, **changes}
    with pytest.raises(CheckpointError, match=message) as refused:
        load(write(tmp_path, changed, grouped_tensors(config)))
    assert str(tmp_path) in str(refused.value)


@pytest.mark.parametrize(
    "config", [QWEN_CONFIG, QWEN_MOE_CONFIG, MIMO_CONFIG, GLM_CONFIG], ids=lambda c: c["architectures"][0]
)
def test_each_tensor_that_is_missing_or_too_many_is_named(tmp_path, config):
    tensors = grouped_tensors(config)
    for index, name in enumerate(tensors):
        if name.endswith("e_score_correction_bias"):
            continue
        (folder := tmp_path / str(index)).mkdir()
        with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
            load(write(folder, config, {n: t for n, t in tensors.items() if n != name}))
    prefix = next(iter(tensors)).partition("norm")[0].rpartition(".")[0]
    (folder := tmp_path / "more").mkdir()
    with pytest.raises(CheckpointError, match=r"no place for: .*another"):
        load(write(folder, config, {**tensors, f"{prefix}.another": torch.ones(2)}))


def test_a_layer_that_speculators_trained_of_an_unknown_kind_is_refused(tmp_path):
    folder = tmp_path / "draft"
    shutil.copytree(FOLDERS / "mtp", folder)
    config = json.loads((folder / "config.json").read_text())
    config["transformer_layer_config"]["model_type"] = "mamba"
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        CheckpointError, match=r"model_type in transformer_layer_config in .* must be qwen3, .* 'mamba'"
    ):
        load(folder, StubTarget(vocab_size=24, hidden_size=16))


def test_a_draft_is_known_by_its_architecture(tmp_path):
    model = load(write(tmp_path, MIMO_CONFIG, grouped_tensors(MIMO_CONFIG)))
    assert type(model) is GroupedPrediction and partial(load, tmp_path)().target_states_size == HIDDEN

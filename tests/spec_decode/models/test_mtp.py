"""DeepSeek-V3's and GLM-4.7-Flash's multi-token prediction against attention with explicit keys and values, in fp64."""

from pathlib import Path

import pytest
import torch

from attn_backends import Accepted, get
from builders import AttentionKind
from spec_decode.drafter import Strategy
from spec_decode.models import CheckpointError, mtp
from spec_decode.models.checkpoints.config_reader import ConfigReader
from spec_decode.models.checkpoints.store import TensorStore
from spec_decode.models.layers.mla_attention import read_mla_shape
from spec_decode.models.layers.rope import read_latent_rope
from tests.factories import CPU
from tests.spec_decode.models.generated_mtp import (
    GLM_CONFIG,
    HIDDEN,
    LAYER,
    V3_CONFIG,
    VOCAB,
    DraftFixture,
    StubTarget,
    assert_drafts_are_those_of_eager,
    assert_drafts_are_those_without_a_cache,
    assert_pieces_say_what_whole_texts_say,
    close,
    v3_tensors,
    write,
)
from tests.spec_decode.models.mtp_oracle import MtpOracle

FORMS = {
    "deepseek_v3": (V3_CONFIG, False),
    "glm_flash": (GLM_CONFIG, False),
    "embedding_and_head_of_the_target": (GLM_CONFIG, True),
    "no_rank_of_queries": ({**V3_CONFIG, "q_lora_rank": None}, False),
    "dense_feed_forward": ({**GLM_CONFIG, "n_routed_experts": None}, False),
}
TARGET = StubTarget()


def load(folder, target=TARGET, dtype=torch.float32):
    return mtp.load(TensorStore.open(folder), target, dtype=dtype, device=CPU)


@pytest.fixture(params=FORMS.values(), ids=FORMS)
def form(request, tmp_path):
    config, shared = request.param
    tensors = v3_tensors(config, shared=shared)
    return load(write(tmp_path, config, tensors)), MtpOracle(config, tensors, TARGET)


@pytest.fixture
def folder(tmp_path):
    return write(tmp_path, V3_CONFIG, v3_tensors(V3_CONFIG))


def test_prefill_and_continuation_say_what_the_whole_text_says(form):
    assert_pieces_say_what_whole_texts_say(*form, [11, 7], [6, 5])


def test_the_drafter_drafts_what_the_draft_without_a_cache_drafts(form):
    assert_drafts_are_those_without_a_cache(*form)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("strategy", [Strategy.DEVICE_LOOP, Strategy.FULL_LOOP, Strategy.PER_STEP])
def test_every_strategy_that_captures_the_step_drafts_what_eager_drafts(folder, strategy, temperature):
    assert_drafts_are_those_of_eager(load(folder), strategy, temperature)


def test_the_latent_kernels_take_the_layers_attention_and_agree_with_the_reference(folder):
    model = load(folder)
    spec = model.layer_groups(16)[0].spec
    assert (spec.kind, spec.head_dim, spec.out_dim) == (AttentionKind.MLA, 48, 32)
    assert isinstance(get("triton_mla").supports(spec, CPU), Accepted)
    for (tokens, logits), (wanted, wanted_logits) in zip(
        DraftFixture(model, "triton_mla").drafts(None), DraftFixture(model).drafts(None), strict=True
    ):
        assert tokens.tolist() == wanted.tolist()
        close(logits, wanted_logits.double())


def test_what_the_layer_hands_on_is_what_that_of_transformers_does(tmp_path):
    transformers = pytest.importorskip("transformers")
    layers = pytest.importorskip("transformers.modeling_layers")
    if not hasattr(layers, "MtpLayer"):
        pytest.skip("this release of transformers has no layer for it")
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek

    plain = {name: value for name, value in V3_CONFIG.items() if name not in ("rope_scaling", "rope_theta")}
    plain |= {"n_routed_experts": None, "rope_parameters": {"rope_type": "default", "rope_theta": 300.0}}
    tensors = v3_tensors(plain)
    config = transformers.DeepseekV3Config(**plain | {"n_routed_experts": 8, "first_k_dense_replace": LAYER + 1})
    config._attn_implementation = "eager"
    layer = layers.MtpLayer(config, deepseek.DeepseekV3DecoderLayer, deepseek.DeepseekV3RMSNorm, 0)
    own = {name.removeprefix(f"model.layers.{LAYER}."): tensor for name, tensor in tensors.items()}
    names = {"shared_head.norm.weight": "post_norm.weight"}
    outer = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
    kept = {name: t for name, t in own.items() if not name.startswith(("embed_tokens", "shared_head.head"))}
    state = {names.get(n, n if n.startswith(outer) else f"mtp_block.{n}"): t for n, t in kept.items()}
    layer.load_state_dict(state)
    ids = torch.randint(0, VOCAB, (9,), generator=torch.Generator().manual_seed(1))
    hidden, places = torch.randn(9, HIDDEN, generator=torch.Generator().manual_seed(2)), torch.arange(9)[None]
    with torch.no_grad():
        found = layer(
            own["embed_tokens.weight"][ids][None], hidden[None],
            deepseek.DeepseekV3RotaryEmbedding(config)(hidden[None], places),
            torch.full((9, 9), -torch.inf).triu(1)[None, None], places, None,
        )  # fmt: skip
    model = load(write(tmp_path, plain, tensors))
    close(
        DraftFixture(model).run([9, 1], [9, 1], torch.cat([ids, ids[:1]]), torch.cat([hidden, hidden[:1]]))[:9],
        found[0].double(),
    )


def test_sizes_as_published_give_the_published_attention():
    config = {**GLM_CONFIG, "num_attention_heads": 20, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
              "qk_nope_head_dim": 192, "v_head_dim": 256, "max_position_embeddings": 202752}  # fmt: skip
    spec = read_mla_shape(ConfigReader(config, "config.json"), HIDDEN, 1e-5).spec(64, torch.bfloat16)
    assert (spec.num_q_heads, spec.head_dim, spec.out_dim, spec.softmax_scale) == (20, 576, 512, 256**-0.5)
    assert isinstance(get("triton_mla").supports(spec, CPU), Accepted)


def test_deepseeks_own_scaling_leaves_rotated_dims_their_size_and_raises_the_scale():
    scaling = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1,
               "mscale": 1.0, "mscale_all_dim": 1.0}  # fmt: skip
    rope = read_latent_rope(ConfigReader({"rope_theta": 10000, "rope_scaling": scaling}, "config.json"), 64)
    assert rope.scaling.amplitude == 1.0 and rope.scaling.softmax_factor == pytest.approx(1.3688879454**2)
    # The first ten pairs turn often enough in 4096 tokens to stay, those from the 23rd on are stretched whole.
    ratio = torch.atan2(rope.table(2)[1, 32:], rope.table(2)[1, :32]).double() / 10000 ** (-torch.arange(32) / 32)
    torch.testing.assert_close(ratio[:11], torch.ones(11).double(), rtol=1e-5, atol=0)
    torch.testing.assert_close(ratio[23:], torch.full((9,), 1 / 40).double(), rtol=1e-3, atol=0)


def test_a_bf16_draft_keeps_its_router_in_fp32(folder):
    target = StubTarget().bfloat16()
    model = load(folder, target, torch.bfloat16)
    wide = {name for name, parameter in model.named_parameters() if parameter.dtype == torch.float32}
    assert wide == {"mlp.router", "mlp.bias"} and model.layer_groups(4)[0].spec.dtype == torch.bfloat16
    tokens = DraftFixture(model).drafts(None)[0][0]
    assert tokens.min() >= 0


def test_the_target_is_no_part_of_the_draft(tmp_path):
    model = load(write(tmp_path, V3_CONFIG, v3_tensors(V3_CONFIG, shared=True)))
    own = {parameter.data_ptr() for parameter in model.parameters()}
    assert own.isdisjoint(parameter.data_ptr() for parameter in TARGET.parameters())


def serves(config):
    return mtp.serves(TensorStore(Path("generated"), config, {}))


def test_only_the_checkpoints_of_the_family_are_served():
    assert serves(V3_CONFIG) and serves(GLM_CONFIG)
    assert not serves({"architectures": ["LlamaForCausalLM"]}) and not serves({})


CONFIG_PROBLEMS = {
    "no_such_layer": ({"num_nextn_predict_layers": 0}, "num_nextn_predict_layers .* at least 1, got 0"),
    "missing_field": ({"kv_lora_rank": None}, "must say kv_lora_rank"),
    "wrong_type": ({"num_attention_heads": "many"}, "num_attention_heads .* got 'many'"),
    "activation": ({"hidden_act": "gelu"}, "hidden_act .* must be 'silu', got 'gelu'"),
    "bias": ({"attention_bias": True}, "attention_bias .* must be False, got True"),
    "vocabulary": ({"vocab_size": VOCAB + 1}, f"vocab_size.* {VOCAB + 1} .*{VOCAB}"),
    "width": ({"hidden_size": HIDDEN + 2}, f"hidden_size.* {HIDDEN + 2} .*{HIDDEN}"),
    "rope_type": ({"rope_scaling": {"type": "dynamic", "factor": 2}}, "default or yarn, got 'dynamic'"),
    "yarn_factor": (
        {"rope_scaling": {"type": "yarn", "factor": 0.5, "original_max_position_embeddings": 8}},
        "at least 1, .* 0.5 and 8",
    ),
    "scoring": ({"scoring_func": "tanh"}, "sigmoid, softmax, sqrtsoftplus, got 'tanh'"),
    "groups": ({"n_group": 3}, "8 experts in 3 groups"),
    "too_many_experts": ({"num_experts_per_tok": 5}, "1 to 4 of the experts that it may choose from, got 5"),
    "odd_rotary": ({"qk_rope_head_dim": 15}, "even number of dims, .* qk_rope_head_dim 15"),
}


@pytest.mark.parametrize(("changes", "message"), CONFIG_PROBLEMS.values(), ids=CONFIG_PROBLEMS)
def test_a_config_that_cannot_be_served_is_refused(tmp_path, changes, message):
    folder = write(tmp_path, {**V3_CONFIG, **changes}, v3_tensors(V3_CONFIG))
    with pytest.raises(CheckpointError, match=message):
        load(folder)


def test_a_target_with_hidden_states_of_another_size_is_refused(folder):
    with pytest.raises(CheckpointError, match="size 32, this target returns 96"):
        load(folder, StubTarget(target_states_size=96))

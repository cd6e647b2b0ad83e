"""What `load_draft` makes of a checkpoint besides its arithmetic, and what it refuses."""

import pytest
import torch

from spec_decode.models import CheckpointError
from spec_decode.models.causal_lm import CausalDraft
from spec_decode.models.deepseek_v4 import DeepseekV4Prediction
from spec_decode.models.dflash import DFlash
from spec_decode.models.dflash2 import DFlash2
from spec_decode.models.eagle import PublishedEagle
from spec_decode.models.eagle3 import Eagle3
from spec_decode.models.grouped_mtp import GroupedPrediction
from spec_decode.models.latent_eagle3 import LatentEagle3
from spec_decode.models.load import aux_hidden_state_layers, load_draft
from spec_decode.models.mtp import MultiTokenPrediction
from spec_decode.models.mtp_draft import MtpModules
from tests.spec_decode.models import generated_mtp
from tests.spec_decode.models.generated import (
    FORMS,
    HIDDEN,
    VOCAB,
    Generated,
    StubTarget,
    make_causal,
    make_dflash,
    make_dflash2,
    make_eagle,
    make_eagle3,
    make_latent_eagle3,
)
from tests.spec_decode.models.generated_mtp import V3_CONFIG, V4_CONFIG, v3_modules, v3_tensors, v4_tensors
from tests.spec_decode.models.grouped_mtp_oracle import QWEN_MOE_CONFIG, grouped_tensors

MAKERS = {"eagle": make_eagle, "eagle3": make_eagle3, "causal": make_causal}
V3_MODULES = {**V3_CONFIG, "num_nextn_predict_layers": 2}
EVERY = MAKERS | {
    "dflash": make_dflash,
    "dflash2": make_dflash2,
    "latent_eagle3": make_latent_eagle3,
    "mtp": lambda: Generated(V3_CONFIG, v3_tensors(V3_CONFIG)),
    "mtp_modules": lambda: Generated(V3_MODULES, v3_modules(V3_MODULES)),
    "grouped_mtp": lambda: Generated(QWEN_MOE_CONFIG, grouped_tensors(QWEN_MOE_CONFIG)),
    "deepseek_v4": lambda: Generated(V4_CONFIG, v4_tensors(V4_CONFIG)),
}
KINDS = {
    "eagle": PublishedEagle, "eagle3": Eagle3, "causal": CausalDraft, "dflash": DFlash, "dflash2": DFlash2,
    "latent_eagle3": LatentEagle3, "mtp": MultiTokenPrediction, "mtp_modules": MtpModules,
    "deepseek_v4": DeepseekV4Prediction, "grouped_mtp": GroupedPrediction,
}  # fmt: skip
TARGETS = {
    "eagle3": {"target_states_size": 3 * HIDDEN}, "dflash": {"target_states_size": 2 * HIDDEN},
    "dflash2": {"target_states_size": 2 * HIDDEN}, "latent_eagle3": {"target_states_size": 3 * HIDDEN},
    "mtp": {"vocab_size": generated_mtp.VOCAB}, "mtp_modules": {"vocab_size": generated_mtp.VOCAB},
    "grouped_mtp": {"vocab_size": generated_mtp.VOCAB},
    "deepseek_v4": {"vocab_size": generated_mtp.VOCAB, "target_states_size": V4_CONFIG["hc_mult"] * HIDDEN},
}  # fmt: skip


def target_for(kind, **changes):
    return StubTarget(**TARGETS.get(kind, {}) | changes)


def load(folder, kind, checkpoint=None, **options):
    target = options.pop("target", None) or target_for(kind)
    checkpoint = checkpoint or EVERY[kind]()
    return load_draft(checkpoint.write(folder), target, **{"dtype": torch.float32, **options})


def refusal(folder, kind, checkpoint=None, **options):
    with pytest.raises(CheckpointError) as refused:
        load(folder, kind, checkpoint, **options)
    return str(refused.value)


def without(checkpoint, *, field=None, tensor=None):
    return Generated(
        {name: value for name, value in checkpoint.config.items() if name != field},
        {name: value for name, value in checkpoint.tensors.items() if name != tensor},
    )


@pytest.mark.parametrize("kind", EVERY)
def test_a_checkpoint_is_known_by_its_names_and_its_architecture(tmp_path, kind):
    assert type(load(tmp_path, kind)) is KINDS[kind]


@pytest.mark.parametrize("architecture", ["EagleLlamaForCausalLM", "LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM"])
@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_the_architecture_that_an_eagle_says_it_has_does_not_matter(tmp_path, kind, architecture):
    checkpoint = MAKERS[kind](architectures=[architecture], model_type="eagle")
    assert type(load(tmp_path, kind, checkpoint)) is KINDS[kind]


def test_an_eagle_may_keep_its_layers_config_in_a_section(tmp_path):
    plain = make_eagle()
    wrapped = Generated({"architectures": ["EAGLEModel"], "model_type": "eagle", "model": plain.config}, plain.tensors)
    assert load(tmp_path, "eagle", wrapped).config == load(tmp_path, "eagle", plain).config


def test_an_unknown_kind_is_refused_with_the_known_ones(tmp_path):
    checkpoint = Generated({"architectures": ["MambaForCausalLM"]}, {"a": torch.ones(1)})
    message = refusal(tmp_path, "causal", checkpoint)
    assert "got architectures ['MambaForCausalLM']" in message
    for known in ("EAGLE-3", "EAGLE (", "multi-token prediction", "Qwen3ForCausalLM"):
        assert known in message


@pytest.mark.parametrize("form", FORMS[1:])
@pytest.mark.parametrize("kind", MAKERS)
def test_every_form_of_a_checkpoint_is_the_same_draft(tmp_path, kind, form):
    expected = load(tmp_path / "plain", kind).state_dict()
    checkpoint = MAKERS[kind]()
    found = load_draft(checkpoint.write(tmp_path / "other", form), target_for(kind), dtype=torch.float32).state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", MAKERS)
def test_parameters_take_the_dtype_and_the_rotary_table_stays_fp32(tmp_path, kind, dtype):
    draft = load(tmp_path, kind, dtype=dtype, target=target_for(kind, dtype=dtype))
    assert {parameter.dtype for parameter in draft.parameters()} == {dtype}
    assert draft.rotary.table.dtype == torch.float32
    assert {group.spec.dtype for group in draft.layer_groups(4)} == {dtype}


@pytest.mark.parametrize("kind", MAKERS)
def test_a_draft_is_ready_to_run(tmp_path, kind):
    draft = load(tmp_path, kind)
    assert not draft.training and not any(parameter.requires_grad for parameter in draft.parameters())
    assert not any(tensor.is_meta for tensor in (*draft.parameters(), *draft.buffers()))


def test_the_sizes_that_the_drafter_asks_for(tmp_path):
    sizes = {
        kind: (
            draft.vocab_size,
            draft.hidden_size,
            draft.target_states_size,
            draft.position_offset,
            draft.max_positions,
        )
        for kind in MAKERS
        for draft in [load(tmp_path / kind, kind)]
    }
    assert sizes == {
        "eagle": (VOCAB, HIDDEN, HIDDEN, 0, 96),
        "eagle3": (VOCAB, HIDDEN, 3 * HIDDEN, 0, 96),
        "causal": (VOCAB, HIDDEN, HIDDEN, 1, 80),
    }


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_the_targets_embedding_is_shared_and_is_no_part_of_the_draft(tmp_path, kind):
    target = target_for(kind)
    draft = load(tmp_path, kind, target=target)
    assert draft.embedding is target.embed.weight
    assert not any(name.startswith(("embed", "_target")) for name in draft.state_dict())


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_an_embedding_of_its_own_is_used(tmp_path, kind):
    checkpoint = MAKERS[kind](own_embedding=True)
    assert torch.equal(load(tmp_path, kind, checkpoint).embedding, checkpoint.tensors["embed_tokens.weight"])


def test_an_eagles_logits_are_the_targets(tmp_path):
    target, hidden = target_for("eagle"), torch.randn(3, HIDDEN)
    assert torch.equal(load(tmp_path, "eagle", target=target).logits(hidden), target.logits(hidden))


@pytest.mark.parametrize("stored", [False, True])
def test_tied_weights_are_one_tensor_whether_stored_once_or_twice(tmp_path, stored):
    checkpoint = make_causal(tie_word_embeddings=True)
    if stored:
        checkpoint.tensors["lm_head.weight"] = checkpoint.tensors["model.embed_tokens.weight"].clone()
    draft = load(tmp_path, "causal", checkpoint)
    assert draft.lm_head.weight.data_ptr() == draft.embed.weight.data_ptr()


def test_layers_of_one_window_share_a_group(tmp_path):
    kinds = ["full_attention", "sliding_attention", "full_attention", "sliding_attention"]
    checkpoint = make_causal(
        "Qwen3ForCausalLM", num_hidden_layers=4, layer_types=kinds, sliding_window=6, use_sliding_window=True
    )
    groups = load(tmp_path, "causal", checkpoint).layer_groups(8)
    assert [(g.name, g.layers, g.spec.sliding_window, g.spec.page_size) for g in groups] == [
        ("layers", (0, 2), None, 8),
        ("window6", (1, 3), 6, 8),
    ]


def layers_of(folder, layers=36, **fields):
    return aux_hidden_state_layers(make_eagle3(**fields).write(folder), layers)


def test_without_a_list_the_aux_layers_are_those_of_eagle3s_training(tmp_path):
    assert layers_of(tmp_path) == (2, 18, 33)


def test_a_target_without_the_layers_of_eagle3s_training_needs_a_list(tmp_path):
    said = (
        r"^eagle_aux_hidden_state_layer_ids in .*, got \[2, 1, -1\], which is what it is taken for where it is left out"
    )
    with pytest.raises(CheckpointError, match=said):
        layers_of(tmp_path, 2)
    target = target_for("eagle3")
    target.num_layers = 2
    assert "got [2, 1, -1]" in refusal(tmp_path, "eagle3", target=target)


def test_only_an_eagle3_has_aux_layers(tmp_path):
    for name, checkpoint in {"eagle": make_eagle(), "causal": make_causal()}.items():
        assert aux_hidden_state_layers(checkpoint.write(tmp_path / name), 36) is None


@pytest.mark.parametrize(
    ("listed", "num_layers", "states"),
    [
        ([1, 46, 90], 94, (2, 47, 91)),
        ([1, 17, 32], 36, (2, 18, 33)),
        ([1, 18, 35], 36, (2, 19, 36)),
        ([2, 18, 33], 36, (2, 18, 33)),
        ([24, 30, 36], 36, (24, 30, 36)),
        ([0, 1, 2], 36, (0, 1, 2)),
    ],
)
def test_a_list_that_begins_with_1_counts_outputs_and_any_other_the_layers_entered(
    tmp_path, listed, num_layers, states
):
    assert layers_of(tmp_path, num_layers, eagle_aux_hidden_state_layer_ids=listed) == states


def test_the_list_may_lie_in_nvidias_section(tmp_path):
    assert layers_of(tmp_path, eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 15, 28]}) == (2, 16, 29)


@pytest.mark.parametrize("layers", [[1, 2, 36], [2, 3, 37], [-1, 2, 3], [2, 3, "4"], [True, 2, 3]])
def test_aux_layers_that_the_target_does_not_have_are_refused(tmp_path, layers):
    with pytest.raises(
        CheckpointError, match=r"eagle_aux_hidden_state_layer_ids in .*must list layers of the target, 0 to 3[56], got "
    ):
        layers_of(tmp_path, eagle_aux_hidden_state_layer_ids=layers)


@pytest.mark.parametrize("layers", [[3], [1, 2], [2, 11, 20, 33]])
def test_any_number_of_auxiliary_layers_is_read(tmp_path, layers):
    shift = layers[0] == 1
    assert layers_of(tmp_path, eagle_aux_hidden_state_layer_ids=layers) == tuple(layer + shift for layer in layers)


@pytest.mark.parametrize(("flag", "tensor"), [("norm_before_fc", "input_norm.weight"), ("fc_norm", "fc_norm.0.weight")])
def test_a_norm_that_has_no_weight_is_refused_by_its_name(tmp_path, flag, tensor):
    message = refusal(tmp_path, "eagle3", make_from(make_eagle3(), {flag: True}))
    assert f"{tmp_path} must hold a tensor {tensor}" in message


def test_norms_of_states_that_no_flag_asks_for_are_refused_by_their_names(tmp_path):
    checkpoint = make_eagle3(fc_norm=True)
    assert "no place for: fc_norm.0.weight" in refusal(tmp_path, "eagle3", without(checkpoint, field="fc_norm"))


def test_a_norm_more_than_states_is_refused_by_its_name(tmp_path):
    checkpoint = make_eagle3(fc_norm=True)
    checkpoint.tensors["fc_norm.3.weight"] = torch.ones(HIDDEN)
    assert "no place for: fc_norm.3.weight" in refusal(tmp_path, "eagle3", checkpoint)


@pytest.mark.parametrize("flag", ["norm_before_fc", "fc_norm", "norm_output"])
def test_a_flag_that_is_no_truth_value_is_refused_by_its_name(tmp_path, flag):
    message = refusal(tmp_path, "eagle3", make_from(make_eagle3(), {flag: "yes"}))
    assert f"{flag} in {tmp_path / 'config.json'} must be true or false, got 'yes'" in message


def test_a_list_of_another_number_of_layers_than_the_target_returns_is_refused(tmp_path):
    message = refusal(tmp_path, "eagle3", make_eagle3(num_states=2, eagle_aux_hidden_state_layer_ids=[2, 3]))
    assert "reads target hidden states of size 64, this target returns 96" in message


@pytest.mark.parametrize("kind", MAKERS)
def test_a_draft_of_another_vocabulary_is_refused_with_both_numbers(tmp_path, kind):
    message = refusal(tmp_path, kind, target=target_for(kind, vocab_size=48))
    assert f"shares its target's vocab_size, {tmp_path} has {VOCAB} and the target 48" in message


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_a_draft_of_another_hidden_size_is_refused_with_both_numbers(tmp_path, kind):
    message = refusal(tmp_path, kind, target=target_for(kind, hidden_size=48))
    assert f"shares its target's hidden_size, {tmp_path} has {HIDDEN} and the target 48" in message


def test_a_draft_of_another_width_needs_an_embedding_of_its_own(tmp_path):
    checkpoint = make_eagle3(target_hidden=48, target_hidden_size=48)
    message = refusal(tmp_path, "eagle3", checkpoint, target=StubTarget(hidden_size=48, target_states_size=144))
    assert f"embedding of its own), {tmp_path} has {HIDDEN} and the target 48" in message


@pytest.mark.parametrize(("kind", "wanted", "found"), [("eagle", 32, 96), ("eagle3", 96, 32)])
def test_a_target_with_hidden_states_of_another_size_is_refused_with_both_numbers(tmp_path, kind, wanted, found):
    message = refusal(tmp_path, kind, target=target_for(kind, target_states_size=found))
    assert f"reads target hidden states of size {wanted}, this target returns {found}" in message


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_a_dtype_that_the_shared_embedding_has_not_is_refused(tmp_path, kind):
    message = refusal(tmp_path, kind, dtype=torch.bfloat16)
    assert "target's embedding, in torch.float32, and was asked for in torch.bfloat16" in message


@pytest.mark.parametrize(
    "field", ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"]
)
@pytest.mark.parametrize("kind", MAKERS)
def test_a_config_without_a_field_is_refused_by_its_name(tmp_path, kind, field):
    message = refusal(tmp_path, kind, without(MAKERS[kind](), field=field))
    assert f"{tmp_path / 'config.json'} must say {field}, an integer" in message


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("vocab_size", "40", "an integer, got '40'"),
        ("vocab_size", True, "an integer, got True"),
        ("rms_norm_eps", "tiny", "a number, got 'tiny'"),
        ("rope_theta", [1], "a number, got [1]"),
        ("tie_word_embeddings", 1, "true or false, got 1"),
        ("layer_types", "full", "a list, got 'full'"),
        ("sliding_window", 2.5, "an integer, got 2.5"),
    ],
)
def test_a_field_of_the_wrong_type_is_refused_with_its_value(tmp_path, field, value, said):
    changes = {"sliding_window": 4, field: value}
    assert f"{field} in {tmp_path / 'config.json'} must be {said}" in refusal(
        tmp_path, "causal", make_from(make_causal(), changes)
    )


def make_from(checkpoint, changes):
    return Generated({**checkpoint.config, **changes}, checkpoint.tensors)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hidden_act": "gelu"}, "hidden_act in"),
        ({"mlp_bias": True}, "mlp_bias in"),
        ({"num_key_value_heads": 3}, "num_q_heads must be a multiple of num_kv_heads, got 4 and 3"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be at least 1, got 0"),
        ({"num_attention_heads": 0}, "num_q_heads must be at least 1, got 0"),
        ({"head_dim": 7}, "head_dim must be even for rotary pairs, got 7"),
        ({"hidden_size": -4}, "hidden_size must be at least 1, got -4"),
        ({"sliding_window": 0}, "sliding_window counts the query itself and must be at least 1, got 0"),
        ({"use_sliding_window": True}, "must say sliding_window"),
        ({"layer_types": ["full_attention"], "sliding_window": 4}, "for each of 2 layers"),
        ({"layer_types": ["full_attention", "chunked_attention"], "sliding_window": 4}, "chunked_attention"),
    ],
)
def test_a_config_that_describes_no_such_decoder_is_refused(tmp_path, changes, said):
    message = refusal(tmp_path, "causal", make_from(make_causal(), changes))
    assert said in message and str(tmp_path / "config.json") in message


NO_PLACE = ["input_norm.weight", "layers.9.mlp.up_proj.weight", "layers.0.mlp.up_proj.bias"]
UNDER = {
    "mtp": "model.layers.2.self_attn.sinks.weight",
    "mtp_modules": "model.layers.3.self_attn.sinks.weight",
    "deepseek_v4": "mtp.0.attn.indexer.wq_b.weight",
    "grouped_mtp": "mtp.layers.0.self_attn.sinks.weight",
}
"""Beside the target's own tensors, which may be there, one under the names of the draft."""
MAY_BE_LEFT_OUT = "t2d", ".embed_tokens.weight", "shared_head.head.weight", "e_score_correction_bias", "gate.bias"
KNOWN_BY = {
    "dflash": (
        "fc.weight",
        "hidden_norm.weight",
        "layers.0.input_layernorm.weight",
        "layers.0.self_attn.q_norm.weight",
    ),
    "dflash2": ("layers.0.self_attn.q_norm.weight",),
}
"""Without it a checkpoint is of another kind, and lacks something else; an EAGLE without its fc is none."""


@pytest.mark.parametrize("kind", EVERY)
def test_each_tensor_that_is_missing_is_named(tmp_path, kind):
    checkpoint = EVERY[kind]()
    names = [name for name in checkpoint.tensors if not name.endswith(MAY_BE_LEFT_OUT)]
    for index, name in enumerate(names):
        if (kind, name) != ("eagle", "fc.weight"):
            message = refusal(tmp_path / str(index), kind, without(checkpoint, tensor=name))
            assert name in message or name in KNOWN_BY.get(kind, ())


@pytest.mark.parametrize("kind", EVERY)
def test_each_tensor_of_another_shape_is_named_with_both_shapes(tmp_path, kind):
    checkpoint = EVERY[kind]()
    for index, (name, tensor) in enumerate(checkpoint.tensors.items()):
        longer = torch.cat([tensor, tensor[:1]])
        wrong = Generated(checkpoint.config, {**checkpoint.tensors, name: longer})
        message = refusal(tmp_path / str(index), kind, wrong)
        assert f"{name} in" in message and f"must be {list(tensor.shape)}, got {list(longer.shape)}" in message


@pytest.mark.parametrize(
    ("kind", "name"),
    [*((kind, name) for kind in (*MAKERS, "dflash", "dflash2", "latent_eagle3") for name in NO_PLACE), *UNDER.items()],
)
def test_a_tensor_that_the_model_has_no_place_for_is_named(tmp_path, kind, name):
    checkpoint = EVERY[kind]()
    checkpoint.tensors[name] = torch.ones(2)
    message = refusal(tmp_path, kind, checkpoint)
    assert "1 tensors " in message and f"this model has no place for: {name}" in message


def test_a_bias_that_the_config_denies_is_refused(tmp_path):
    checkpoint = make_causal(attention_bias=True)
    checkpoint.config["attention_bias"] = False
    assert "8 tensors that this model has no place for" in refusal(tmp_path, "causal", checkpoint)


def test_maps_that_disagree_are_refused(tmp_path):
    checkpoint = make_eagle3()
    checkpoint.tensors["d2t"] = checkpoint.tensors["d2t"].flip(0)
    assert f"d2t in {tmp_path} must map 24 tokens" in refusal(tmp_path, "eagle3", checkpoint)

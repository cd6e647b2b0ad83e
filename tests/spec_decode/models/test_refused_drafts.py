"""Faulty checkpoints of drafts: `load_draft` names the field or tensor, and the file."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file

from spec_decode.models import CheckpointError
from spec_decode.models.load import load_draft, load_with_tokens
from tests.factories import CPU
from tests.spec_decode.models.generated import (
    HIDDEN,
    VOCAB,
    Generated,
    StubTarget,
    make_dflash,
    make_dflash2,
    make_eagle3,
)
from tests.spec_decode.models.test_published_drafts import EVERY, states
from tests.spec_decode.models.test_speculators_drafts import FOLDERS, target_of

CHAINS = ("eagle", "eagle3", "latent_eagle3", "deepseek_v3", "deepseek_v4", "qwen")
CONTEXT_BLOCKS = ("dflash", "dflash2", "dspark")
DECODERS = ("eagle", "eagle3", "llama")


def refusal(folder, checkpoint, target, dtype=torch.float32):
    with pytest.raises(CheckpointError) as refused:
        load_draft(checkpoint.write(folder), target, dtype=dtype)
    return str(refused.value)


def refused_for(folder, kind, checkpoint=None, **changes):
    """As the draft of that kind, for its target with these changes."""
    case, dtype = EVERY[kind], changes.pop("draft_dtype", torch.float32)
    return refusal(folder, checkpoint or case.checkpoint, StubTarget(**{**case.target, **changes}), dtype)


@pytest.mark.parametrize("config", [{"architectures": ["MambaForCausalLM"]}, {"architectures": ["DeepseekV41"]}, {}])
def test_unknown_kind_is_rejected_with_known_ones(tmp_path, config):
    message = refused_for(tmp_path, "eagle", Generated(config, {"a": torch.ones(1)}))
    assert f"got architectures {config.get('architectures')}" in message
    for known in ("EAGLE-3", "EAGLE (", "multi-token prediction", "Qwen3ForCausalLM"):
        assert known in message


@pytest.mark.parametrize("kind", (*CHAINS, *CONTEXT_BLOCKS, "llama"))
def test_target_of_other_sizes_is_rejected_with_both(tmp_path, kind):
    case = EVERY[kind]
    own = StubTarget(**case.target)
    message = refused_for(tmp_path, kind, vocab_size=own.vocab_size + 8)
    expected = f"{tmp_path} has vocab_size {own.vocab_size}, the target {own.vocab_size + 8}; "
    assert expected in message
    read = own.target_states_size
    if kind != "llama":
        message = refused_for(tmp_path, kind, target_states_size=read + 2)
        assert f"reads target hidden states of size {read}, this target returns {read + 2}. " in message
        assert ("residual streams" in message) is (kind == "deepseek_v4")
    if kind in CHAINS:
        message = refused_for(tmp_path, kind, hidden_size=HIDDEN + 16, target_states_size=read)
        assert re.search(rf" has (target_)?hidden_size {HIDDEN}, the target 48", message)


@pytest.mark.parametrize("kind", ["eagle", "eagle3", "dflash"])
def test_dtype_unlike_shared_embedding_is_rejected(tmp_path, kind):
    message = refused_for(tmp_path, kind, draft_dtype=torch.bfloat16)
    assert "target's embedding, in torch.float32, but dtype is torch.bfloat16" in message


@pytest.mark.parametrize(
    "field", ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"]
)
def test_config_without_a_field_is_rejected_by_name(tmp_path, field):
    for kind in DECODERS:
        message = refused_for(tmp_path, kind, EVERY[kind].checkpoint.changed(without=[field]))
        assert f"{tmp_path / 'config.json'} lacks {field}, an integer" in message


SIZES = ("block_size", "conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
FLAGS = ("norm_before_fc", "fc_norm", "norm_output")
NO_LAYERS = r"must list layers of the target, 0 to 6, got "
SECTION = "transformer_layer_config"
PARTIAL = {"partial_rotary_factor": None, "rope_parameters": {"rope_theta": 300.0}}
WRONG = [
    ("llama", {"vocab_size": "40"}, "vocab_size in .* an integer, got '40'"),
    ("llama", {"vocab_size": True}, "vocab_size in .* an integer, got True"),
    ("llama", {"rms_norm_eps": "tiny"}, "rms_norm_eps in .* a number, got 'tiny'"),
    ("llama", {"rope_theta": [1]}, r"rope_theta in .* a number, got \[1\]"),
    ("llama", {"tie_word_embeddings": 1}, "tie_word_embeddings in .* true or false, got 1"),
    ("llama", {"sliding_window": 4, "layer_types": "full"}, "layer_types in .* a list, got 'full'"),
    ("llama", {"sliding_window": 2.5}, "sliding_window in .* an integer, got 2.5"),
    ("llama", {"hidden_act": "gelu"}, "^hidden_act in "),
    ("llama", {"mlp_bias": True}, "^mlp_bias in "),
    ("llama", {"num_key_value_heads": 3}, "num_q_heads must be a multiple of num_kv_heads, got 4 and 3"),
    ("llama", {"num_hidden_layers": 0}, "num_hidden_layers must be at least 1, got 0"),
    ("llama", {"num_attention_heads": 0}, "num_q_heads must be at least 1, got 0"),
    ("llama", {"head_dim": 7}, "head_dim must be even for rotary pairs, got 7"),
    ("llama", {"hidden_size": -4}, "hidden_size must be at least 1, got -4"),
    ("mistral", {"sliding_window": 0}, "counts the query itself and must be at least 1, got 0"),
    ("mistral", {"use_sliding_window": 1}, "use_sliding_window in .* true or false, got 1"),
    ("llama", {"layer_types": ["full_attention"], "sliding_window": 4}, "for each of 2 layers"),
    ("llama", {"layer_types": ["full_attention", "chunked_attention"], "sliding_window": 4}, "chunked_attention"),
    ("llama", {"layer_types": [["full_attention"], {}], "sliding_window": 4}, r"got \[\['full_attention'\], \{\}\]"),
    ("llama_tied_and_biased", {"attention_bias": False}, "8 unexpected tensors: "),
    *(("pard", {"pard_token": t}, rf"pard_token .* 0 to {VOCAB - 1}, got {t}") for t in (-1, VOCAB, 10**9)),
    *(("pard", {"pard_token": t}, "pard_token .* must be an integer") for t in ("5", 5.0, True)),
    ("p_eagle", {"ptd_token_id": None}, r"dflash_config.mask_token_id, mask_token_id, .*pard_token, ptd_token_id"),
    ("eagle3", {"norm_before_fc": True}, r"lacks the tensor input_norm\.weight"),
    ("eagle3", {"fc_norm": True}, r"lacks the tensor fc_norm\.0\.weight"),
    ("eagle3_1", {"fc_norm": False}, r"unexpected tensors: fc_norm\.0\.weight"),
    *(("eagle3", {name: "yes"}, f"^{name} in .* true or false, got 'yes'") for name in FLAGS),
    ("eagle3", {"eagle_aux_hidden_state_layer_ids": [2, 3]}, "hidden states of size 64, this target returns 96"),
    ("latent_eagle3", {"num_hidden_layers": 2}, "^num_hidden_layers in .* must be 1 .*, got 2"),
    ("latent_eagle3", {"hidden_act": "gelu"}, "^hidden_act in .* must be 'silu', got 'gelu'"),
    ("latent_eagle3", {"attention_bias": True}, "^attention_bias in .* must be False, got True"),
    ("latent_eagle3", {"kv_lora_rank": None}, "lacks kv_lora_rank, an integer"),
    ("latent_eagle3", {"kv_lora_rank": 31}, r"kv_a_proj_with_mqa\.weight in .* must be \[47, 64\], got \[48, 64\]"),
    ("latent_eagle3", {"rope_scaling": {"rope_type": "llama3"}}, "^rope_type in .* default or yarn, got 'llama3'"),
    ("latent_eagle3", {"fc_norm": True}, r"lacks the tensor fc_norm\.0\.weight"),
    ("latent_eagle3", {"draft_vocab_size": None}, r"^d2t in .* must be \[40\], got \[24\]"),
    ("latent_eagle3", {"eagle_aux_hidden_state_layer_ids": [2, 3, 4, 5]}, "states of size 128, this target returns 96"),
    ("latent_eagle3", {"target_hidden_size": 48}, "has hidden_size 48, the target 32"),
    ("dflash", {"dflash_config.mask_token_id": None}, "a DFlash draft predicts masks"),
    ("dflash", {"dflash_config.mask_token_id": VOCAB}, f"0 to {VOCAB - 1}, got {VOCAB}"),
    ("dflash", {"layer_types": ["full_attention"]}, "for each of 2 layers"),
    ("dflash", {"layer_types": ["full_attention", "linear"]}, "^layer_types in "),
    ("dflash", {"layer_types": ["sliding_attention"] * 2, "use_sliding_window": False}, "neither sliding_window nor"),
    ("dflash", {"layer_types": [["full_attention"], {}]}, "^layer_types in "),
    ("dflash", {"dflash_config.use_swa": True}, "neither sliding_window nor"),
    ("dflash", {"dflash_config.use_swa": True, "dflash_config.swa_window_size": -3},
     "^swa_window_size in dflash_config in .* must be 1 or more, got -3"),
    ("dflash", {"dflash_config.target_layer_ids": [0, 1, 2]}, "reads target hidden states of size 96"),
    ("dflash", {"dflash_config.target_layer_ids": None}, "list the target layers that the draft reads, and has none of "
     r"dflash_config.target_layer_ids, .*, aux_hidden_state_layer_ids\. "),
    ("dflash", {"dflash_config.sample_from_anchor": 1}, "^sample_from_anchor in "),
    ("dflash", {"is_causal": "no"}, "is_causal in .* must be true or false"),
    *(("dflash", {"block_size": size}, rf"^block_size in .* must be 2 or more, got {size}\.") for size in (1, 0, -3)),
    ("dflash", {"dflash_config.block_size": 0}, r"^block_size in dflash_config in .* must be 2 or more, got 0\."),
    ("dspark", {"block_size": 0}, r"^block_size in .* must be 1 or more, got 0\."),
    ("dflash", {"block_size": "16"}, "^block_size in .* must be an integer, got '16'"),
    *(
        ("dflash", {f"dflash_config.{name}": 0.5}, rf"^{name} in dflash_config in .*must be .*, got 0\.5")
        for name in ("attention_value_scale", "input_embedding_scale", "output_multiplier", "final_logit_softcapping")
    ),
    ("dspark", {"markov_head_type": "gated"}, "markov_head_type in .* must be 'vanilla', got 'gated'"),
    ("dspark", {"markov_rank": 0}, "markov_rank in .* must be 1 or more, got 0"),
    *(("dflash2", {f"dflash_config.{name}": None}, f"^dflash_config in .* lacks {name}, an int") for name in SIZES),
    *(
        ("dflash2", {f"dflash_config.{name}": size}, f"^{name} in .*config.json must {says}, got {size}")
        for name, size, says in (
            ("conv_kernel_size", 0, "be 1 to 8"),
            ("conv_kernel_size", 9, "be 1 to 8"),
            ("block_size", 0, "be 1 to 4096"),
            ("conv_group_size", 0, f"be 1 to {HIDDEN}"),
            ("conv_group_size", 2 * HIDDEN, f"be 1 to {HIDDEN}"),
            ("conv_group_size", 5, f"divide hidden_size {HIDDEN}"),
            ("selector_rank", 0, "be 1 to 4096"),
            ("selector_top_k", 0, f"be 1 to {VOCAB}"),
            ("selector_top_k", VOCAB + 1, f"be 1 to {VOCAB}"),
        )
    ),
    ("dflash2", {"dflash_config.selector_rank": "6"}, "selector_rank in .* must be an integer, got '6'"),
    ("deepseek_v3", {"num_nextn_predict_layers": 0}, "num_nextn_predict_layers .* at least 1, got 0"),
    ("deepseek_v3", {"kv_lora_rank": None}, "lacks kv_lora_rank"),
    ("deepseek_v3", {"num_attention_heads": "many"}, "num_attention_heads .* got 'many'"),
    ("deepseek_v3", {"hidden_act": "gelu"}, "hidden_act .* must be 'silu', got 'gelu'"),
    ("deepseek_v3", {"attention_bias": True}, "attention_bias .* must be False, got True"),
    ("deepseek_v3", {"rope_scaling": {"type": "dynamic", "factor": 2}}, "default or yarn, got 'dynamic'"),
    ("deepseek_v3", {"rope_scaling": {"type": "yarn", "factor": 0.5, "original_max_position_embeddings": 8}},
     "at least 1, got 0.5 and 8"),
    *(
        ("deepseek_v3", {"rope_scaling": {"type": "yarn", "factor": 2, "original_max_position_embeddings": 8, name: 0}},
         f"^{name} in rope_scaling in .* must be positive, got 0")
        for name in ("beta_fast", "beta_slow")
    ),
    ("deepseek_v3", {"rope_scaling.attention_factor": 1.5},
     r"^attention_factor in rope_scaling in .* must be 0\.9\d+, got 1\.5"),
    ("deepseek_v3", {"rope_scaling.truncate": False}, "^truncate in rope_scaling in .* must be True, got False"),
    *(
        (kind, {"rope_interleave": False}, "^rope_interleave in .* must be True, got False")
        for kind in ("deepseek_v3", "glm_flash", "latent_eagle3")
    ),
    ("deepseek_v3", {"scoring_func": "tanh"}, "sigmoid, softmax, sqrtsoftplus, got 'tanh'"),
    ("deepseek_v3", {"n_group": 3}, "8 experts in 3 groups"),
    ("deepseek_v3", {"num_experts_per_tok": 5}, "top_k must be 1 to 4, .*, got 5"),
    ("deepseek_v3", {"qk_rope_head_dim": 15}, "qk_rope_head_dim positive and even, .* and 15"),
    ("deepseek_v4", {"compress_ratios": [0, 4, 4]}, "0 or 1 at the draft's layer 2, got 4"),
    ("deepseek_v4", {"o_groups": 3}, "4 heads in 3 groups"),
    ("deepseek_v4", {"qk_rope_head_dim": 66}, "66 of 64 dims"),
    ("deepseek_v4", {"hc_mult": 0}, "hc_mult .*at least 1.* got 0"),
    ("deepseek_v4", {"hc_sinkhorn_iters": 0}, "hc_sinkhorn_iters .*at least 1.* got 0"),
    ("deepseek_v4", {"hc_mult": None}, "lacks hc_mult"),
    *(("deepseek_v4", {"sliding_window": window}, "sliding_window") for window in (0, -1, 10**12, True)),
    ("qwen_of_experts", PARTIAL, "2 to 12 dims, got 0.25 of 12"),
    ("qwen", {"text_config.mtp_num_hidden_layers": 0}, "mtp_num_hidden_layers in text_config in .* be 1, got 0"),
    ("qwen", {"text_config.num_attention_heads": None}, "text_config in .* lacks num_attention_heads"),
    ("qwen_of_experts", {"num_experts_per_tok": 9}, "top_k must be 1 to 8, .* got 9"),
    ("qwen_of_experts", {"shared_expert_intermediate_size": None}, "lacks shared_expert_intermediate_size"),
    ("mimo", {"use_qk_norm": 3}, "use_qk_norm in .* must be .*, got 3"),
    ("mimo", {"num_nextn_predict_layers": 2}, "num_nextn_predict_layers in .* must be 1, got 2"),
    ("mimo", {"num_key_value_heads": 4}, "invalid attention in .*: "),
    ("mimo", {"head_dim": 13}, "invalid attention in .*: head_dim must be even"),
    ("mimo", {"rope_scaling": {"rope_type": "dynamic"}}, "rope_type in .* got 'dynamic'"),
    ("glm_flash", {"num_nextn_predict_layers": 2}, "draft layers, 2 from .* got 1"),
    ("glm_of_modules", {"num_nextn_predict_layers": 5}, "draft layers, 5 from .* got 4"),
    ("glm_of_modules", {"num_nextn_predict_layers": 0}, "num_nextn_predict_layers .* at least 1, got 0"),
    ("glm_of_modules", {"hidden_act": "gelu"}, "hidden_act .* must be 'silu', got 'gelu'"),
    ("glm_of_modules", {"partial_rotary_factor": 1.5}, "2 to 12 dims, got 1.5 of 12"),
    ("glm_of_modules", {"partial_rotary_factor": 0.25}, "2 to 12 dims, got 0.25 of 12"),
]  # fmt: skip
"""A kind, changes of its config.json, and what is said."""


@pytest.mark.parametrize(("kind", "changes", "says"), WRONG)
def test_wrong_config_is_rejected_by_name(tmp_path, kind, changes, says, monkeypatch):
    if kind == "dflash2":
        # Its sizes are judged before memory is asked for.
        monkeypatch.setattr("spec_decode.models.dflash.read_parameters", lambda *_: pytest.fail("were read"))
    message = refused_for(tmp_path, kind, EVERY[kind].checkpoint.changed(changes))
    assert re.search(says, message), message
    assert str(tmp_path) in message


SPECULATORS = [
    ("dflash", {"aux_hidden_state_layer_ids": None}, r"has none of .*, aux_hidden_state_layer_ids\. "),
    ("dflash", {"aux_hidden_state_layer_ids": []}, rf"^aux_hidden_state_layer_ids in .*{NO_LAYERS}\[\]"),
    ("dflash", {"aux_hidden_state_layer_ids": [1, 7]}, rf"^aux_hidden_.* {NO_LAYERS}\[1, 7\]"),
    ("eagle3", {"eagle_aux_hidden_state_layer_ids": [1, 3, 7]}, rf"^eagle_aux_.* {NO_LAYERS}\[1, 3, 7\]"),
    ("dspark", {"aux_hidden_state_layer_ids": [1, "4"]}, rf"^aux_hidden_.* {NO_LAYERS}\[1, '4'\]"),
    ("dflash", {"mask_token_id": None}, "a DFlash draft predicts masks"),
    ("peagle", {"mask_token_id": None}, "the checkpoint has mask_hidden"),
    ("dflash", {SECTION: None}, "lacks transformer_layer_config, an object"),
    ("eagle3", {SECTION: []}, "transformer_layer_config in .* an object"),
    ("dflash", {f"{SECTION}.hidden_size": None}, r"^transformer_layer_config in .*config\.json lacks hidden_size"),
    ("dflash_mixed", {f"{SECTION}.layer_types": ["full_attention"]}, rf"^layer_types in {SECTION} .* each of 2 layers"),
    ("dflash_mixed", {f"{SECTION}.use_sliding_window": False, f"{SECTION}.sliding_window": None},
     "^transformer_layer_config in .* has sliding-window layers, but neither"),
    ("dflash_mixed", {f"{SECTION}.rope_parameters": {"sliding_attention": {"rope_theta": 1e4}}},
     "^rope_parameters in .* must be the same for all layers, got one for sliding_attention"),
    ("dflash_mixed", {"sliding_window_non_causal": "no"}, "^sliding_window_non_causal in "),
    ("dflash", {"sample_from_anchor": 1}, "^sample_from_anchor in "),
    ("dspark_gated", {}, "^markov_head_type in .* must be 'vanilla', got 'gated'"),
    ("dspark", {"markov_rank": 5}, r"^markov_head\.markov_w1\.weight in .* must be \[24, 5\]"),
    ("dspark", {"enable_confidence_head": False}, "unexpected tensors: confidence_head"),
    ("dflash", {"target_hidden_size": 48}, "has target_hidden_size 48, the target 16"),
    ("dflash", {f"{SECTION}.vocab_size": 30}, "has vocab_size 30, the target"),
    ("dflash", {"draft_vocab_size": None}, r"^d2t in .* must be \[24\], got \[15\]"),
    ("eagle3", {"speculators_model_type": 3}, "^speculators_model_type in .* a string, got 3"),
    ("mtp", {f"{SECTION}.model_type": "mamba"}, f"model_type in {SECTION} in .* must be one of qwen3, .* 'mamba'"),
]  # fmt: skip
"""The same of drafts that `speculators` wrote."""


@pytest.mark.parametrize(("name", "changes", "says"), SPECULATORS)
def test_wrong_speculators_config_is_rejected_by_name(tmp_path, name, changes, says):
    folder = FOLDERS / name
    written = Generated(json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors"))
    message = refusal(tmp_path, written.changed(changes), target_of(name.removesuffix("_gated")))
    assert re.search(says, message), message
    assert str(tmp_path) in message


def test_draft_token_outside_target_is_rejected(tmp_path):
    """A map to a row of padding that only the draft has."""
    map_ = make_eagle3().tensors["d2t"].clone()
    map_[-1] = VOCAB + 1 - 23
    folder = make_eagle3().changed({"vocab_size": VOCAB + 3}, {"d2t": map_}, ["t2d"]).write(tmp_path)
    with pytest.raises(CheckpointError, match=f"1 map outside the target's vocabulary, first 23 to {VOCAB + 1}"):
        load_with_tokens(folder, StubTarget(**states(3)), dtype=torch.float32, device=CPU, same_tokens=True)


def test_mask_token_without_embedding_is_rejected(tmp_path):
    """The target's embedding has no row for a token of the draft's padding."""
    draft = make_dflash(vocab_size=VOCAB + 3, dflash_config={"mask_token_id": VOCAB})
    with pytest.raises(CheckpointError, match=f"mask_token_id in .* 0 to {VOCAB - 1}, got {VOCAB}"):
        load_with_tokens(
            draft.write(tmp_path), StubTarget(**states(2)), dtype=torch.float32, device=CPU, same_tokens=True
        )


def test_different_vocabulary_sizes_need_target_folder(tmp_path):
    message = refused_for(tmp_path, "llama", vocab_size=VOCAB + 8)
    assert f"has vocab_size {VOCAB}, the target {VOCAB + 8}; they can differ in rows of padding only" in message
    assert "load_draft also needs target_folder." in message


NARROW, WIDE = states(2), states(3, 48)
MISFITS = {
    "another width without an embedding": (make_eagle3(target_hidden=48, target_hidden_size=48), WIDE,
                                           rf"without an embedding, has hidden_size {HIDDEN}, the target 48"),
    "another width without EAGLE-3's head": (
        make_eagle3(draft_vocab=None, own_head=False, own_embedding=True, hidden_size=48, target_hidden_size=HIDDEN),
        states(3), "without a head, has hidden_size 48, the target 32",
    ),
    "no head for a target that scales its logits": (make_eagle3(own_head=False), states(3),
                                                    r"has a d2t and no lm_head\.weight, .* Add lm_head\.weight"),
    "fewer tokens without a map": (make_eagle3(draft_vocab=None, own_head=False, draft_vocab_size=24), states(3),
                                   "lacks the tensor d2t"),
    "another width without a head": (make_dflash(hidden_size=48, own_embedding=True), NARROW,
                                     "without a head, has hidden_size 48"),
    "maps that disagree": (make_eagle3().changed(tensors={"d2t": make_eagle3().tensors["d2t"].flip(0)}), states(3),
                           "d2t in .* must map 24 draft tokens"),
    "a mask state without a mask": (make_eagle3(mask=()), states(3), "the checkpoint has mask_hidden"),
    "a mask state of another size": (
        make_eagle3(mask=(), ptd_token_id=3).changed(tensors={"mask_hidden": torch.zeros(HIDDEN)}), states(3),
        rf"mask_hidden .* must be \[{3 * HIDDEN}\], got \[{HIDDEN}\]",
    ),
    "a norm more than states": (make_eagle3(fc_norm=True).changed(tensors={"fc_norm.3.weight": torch.ones(HIDDEN)}),
                                states(3), r"unexpected tensors: fc_norm\.3\.weight"),
    "a list of other states than are read": (make_eagle3(num_states=2), states(2), "hidden states of size 96"),
    "a DFlash2 without its sizes": (make_dflash(architectures=["DFlash2DraftModel"]), NARROW, "lacks "),
    "a DFlash2 without its tensors": (Generated(make_dflash2().config, make_dflash().tensors), NARROW,
                                      r"lacks the tensor layers\.0\.attention_conv\.base_kernel"),
    "a DFlash2 of its own vocabulary": (make_dflash2(draft_vocab=24), NARROW,
                                        f"^draft_vocab_size in .* must be the target's {VOCAB}, got 24 and a d2t"),
    "more candidates than a kernel holds": (make_dflash2(vocab_size=99, candidates=65), {"vocab_size": 99, **NARROW},
                                            "^selector_top_k in .* must be 1 to 64, got 65"),
}  # fmt: skip


@pytest.mark.parametrize(("checkpoint", "target", "says"), MISFITS.values(), ids=MISFITS)
def test_misfit_checkpoint_is_rejected(tmp_path, checkpoint, target, says):
    message = refusal(tmp_path, checkpoint, StubTarget(**target))
    assert re.search(says, message), message


def test_separate_mask_embedding_file_is_rejected(tmp_path):
    torch.save(torch.zeros(HIDDEN), tmp_path / "mask_embedding.pt")
    assert "has mask_embedding.pt" in refused_for(tmp_path, "dflash")


NAMED_INSTEAD = {
    "dflash": r"fc.weight|hidden_norm.weight|layers.0.input_layernorm.weight|layers.0.self_attn.q_norm.weight",
    "dflash2": "layers.0.self_attn.q_norm.weight",
    "dspark": r"markov_head.markov_w[12].weight|layers.0.self_attn.q_norm.weight",
}
"""Without one of these a checkpoint is of another kind or form, and lacks something else."""
OPTIONAL = r"t2d|.*\.embed_tokens\.weight|.*shared_head\.head\.weight"
INNER_EXPERT = r".*\.experts\.[1-6]\..*"


@pytest.mark.parametrize(
    "kind", [*CHAINS, *CONTEXT_BLOCKS, "llama", "qwen_of_experts", "mimo", "glm_with_embedding_and_head"]
)
def test_missing_or_misshapen_tensor_is_named(tmp_path, kind):
    checkpoint = EVERY[kind].checkpoint
    for name, tensor in checkpoint.tensors.items():
        if re.fullmatch(INNER_EXPERT, name):
            continue
        longer = torch.cat([tensor, tensor[:1]])
        message = refused_for(tmp_path, kind, checkpoint.changed(tensors={name: longer}))
        assert f"{name} in" in message and f"must be {list(tensor.shape)}, got {list(longer.shape)}" in message
        if not re.fullmatch(OPTIONAL, name) and (kind, name) != ("eagle", "fc.weight"):
            message = refused_for(tmp_path, kind, checkpoint.changed(without=[name]))
            assert name in message or re.fullmatch(NAMED_INSTEAD.get(kind, ""), name)


NO_PLACE = {
    **dict.fromkeys((*DECODERS, "dflash", "dflash2", "latent_eagle3"), "layers.9.mlp.up_proj.weight"),
    "eagle3_of_two_layers": "input_norm.weight",
    "dflash_from_the_anchor": "layers.0.mlp.up_proj.bias",
    "dflash2_from_the_anchor": "candidate_selector.bias",
    "deepseek_v3": "model.layers.2.self_attn.sinks.weight",
    "deepseek_v3_of_modules": "model.layers.3.self_attn.sinks.weight",
    "deepseek_v4": "mtp.0.attn.indexer.wq_b.weight",
    "qwen": "mtp.layers.0.self_attn.sinks.weight",
    "mimo": "model.mtp_layers.0.another",
    "glm": "model.layers.2.another",
}


@pytest.mark.parametrize(("kind", "name"), NO_PLACE.items())
def test_unexpected_tensor_is_named(tmp_path, kind, name):
    """Beside the target's own tensors, which may be there with multi-token prediction."""
    more = [name, "model.norm.weight"] if name.startswith("m") else [name]
    message = refused_for(
        tmp_path, kind, EVERY[kind].checkpoint.changed(tensors={each: torch.ones(2) for each in more})
    )
    assert "1 unexpected tensors" in message and f": {name}; the first is in model.safetensors. Ignoring" in message

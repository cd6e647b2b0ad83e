"""Kinds of draft that are published and not served: refused by their names, not for what they have beyond others."""

import re
from pathlib import Path

import pytest
import torch

from spec_decode.models import CheckpointError
from spec_decode.models.load import aux_hidden_state_layers, load_draft
from tests.spec_decode.models.generated import HIDDEN, Generated, StubTarget, make_dflash
from tests.spec_decode.models.generated_mtp import V3_CONFIG, V4_CONFIG, v3_tensors, v4_tensors
from tests.spec_decode.models.grouped_mtp_oracle import QWEN_CONFIG, grouped_tensors

FOLDERS = Path(__file__).parent / "speculators_drafts"
WIDE = torch.ones(2, 3)


def with_tensor(name, checkpoint=None):
    checkpoint = checkpoint or make_dflash()
    return Generated(checkpoint.config, {**checkpoint.tensors, name: WIDE})


def qwen():
    return Generated(QWEN_CONFIG, grouped_tensors(QWEN_CONFIG))


GENERATED = {
    "XPress by name": (make_dflash(architectures=["Qwen3XPressModel"]), r"XPress, .*\['Qwen3XPressModel'\]"),
    "XPress by tensors": (with_tensor("xpress_head.mix.L"), r"XPress, .*\(a tensor xpress_head\.mix\.L\)"),
    "LiLiCorr by name": (make_dflash(architectures=["LiLiCorrDraftModel"]), "LiLiCorr, .*architectures"),
    "LiLiCorr by tensors": (with_tensor("model.lilicorr.layers.0.up.weight"), r"LiLiCorr, .*\(a tensor model\.lili"),
    "Domino in its section": (
        make_dflash(dflash_config={"projector_type": "domino"}),
        r"Domino, .*\(projector_type 'domino'\)",
    ),
    "Domino at the top": (make_dflash(projector_type="domino"), r"Domino, .*\(projector_type 'domino'\)"),
    "Domino by tensors": (with_tensor("prefix_gru.weight_ih_l0"), r"Domino, .*\(a tensor prefix_gru\.weight_ih_l0\)"),
    "DeepSeek-V4's DSpark": (
        with_tensor("mtp.2.markov_head.markov_w1.weight", Generated(V4_CONFIG, v4_tensors(V4_CONFIG))),
        r"DeepSeek-V4's DSpark, .*\(a tensor mtp\.2\.markov_head\.markov_w1\.weight\)",
    ),
    "GLM-5's": (
        with_tensor("model.layers.2.self_attn.indexer.wk.weight", Generated(V3_CONFIG, v3_tensors(V3_CONFIG))),
        r"multi-token prediction over tokens that an indexer chooses, .*indexer\.wk\.weight\)",
    ),
    "Qwen's over hyper-connections": (
        with_tensor("mtp.hyper_connection_mixer.hc_norm.weight", qwen()),
        r"Qwen's multi-token prediction over hyper-connections \(a tensor mtp\.hyper_connection_mixer\.hc_norm",
    ),
    "MiMo-V2's": (
        with_tensor("model.mtp.layers.0.eh_proj.weight", qwen()),
        r"MiMo-V2's multi-token prediction, .*\(a tensor model\.mtp\.layers\.0\.eh_proj\.weight\)",
    ),
}


def refusals(folder):
    """What is said where the draft is loaded, and where its target is about to be made."""
    target = StubTarget(target_states_size=2 * HIDDEN)
    for read in (lambda: load_draft(folder, target, dtype=torch.float32), lambda: aux_hidden_state_layers(folder, 8)):
        with pytest.raises(CheckpointError) as refused:
            read()
        yield str(refused.value)


@pytest.mark.parametrize(("checkpoint", "says"), GENERATED.values(), ids=GENERATED)
def test_a_kind_that_is_not_served_is_named(tmp_path, checkpoint, says):
    for message in refusals(checkpoint.write(tmp_path)):
        assert message.startswith(f"{tmp_path / 'config.json'} must be of a kind of draft that is served, it is of ")
        assert re.search(says, message), message
        assert "DSpark (markov_head among its tensors)" in message


def test_quantised_weights_of_a_kind_that_is_not_served_are_named_for_their_kind(tmp_path):
    checkpoint, says = GENERATED["DeepSeek-V4's DSpark"]
    quantised = Generated({**checkpoint.config, "quantization_config": {"quant_method": "fp8"}}, checkpoint.tensors)
    for message in refusals(quantised.write(tmp_path)):
        assert re.search(says, message), message


@pytest.mark.parametrize(
    ("name", "says"),
    [("xpress", "XPress, ")],
)
def test_what_speculators_writes_of_them_is_named_too(name, says):
    for message in refusals(FOLDERS / name):
        assert f"it is of {says}" in message and f"(speculators_model_type '{name}')" in message


@pytest.mark.parametrize(
    "name", ["attention_value_scale", "input_embedding_scale", "output_multiplier", "final_logit_softcapping"]
)
def test_a_factor_that_the_draft_was_trained_with_and_nothing_here_applies_is_refused(tmp_path, name):
    folder = make_dflash(dflash_config={name: 0.5}).write(tmp_path)
    with pytest.raises(CheckpointError, match=rf"^{name} in dflash_config in .*config\.json must be .*, got 0\.5"):
        load_draft(folder, StubTarget(target_states_size=2 * HIDDEN), dtype=torch.float32)

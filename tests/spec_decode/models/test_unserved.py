"""Published kinds of draft that are not supported are rejected by name, not for the extra features they have."""

import pytest
import torch

from spec_decode.models import CheckpointError
from spec_decode.models.load import aux_hidden_state_layers, load_draft
from tests.spec_decode.models.generated import HIDDEN, StubTarget, make_dflash
from tests.spec_decode.models.generated_mtp import QWEN_CONFIG, V3_CONFIG, make_mtp, make_v4
from tests.spec_decode.models.test_speculators_drafts import FOLDERS

NAMED = [
    ("XPress, ", make_dflash(architectures=["Qwen3XPressModel"]), "architectures ['Qwen3XPressModel']"),
    ("LiLiCorr, ", make_dflash(architectures=["LiLiCorrDraftModel"]), "architectures ['LiLiCorrDraftModel']"),
    ("Domino, ", make_dflash(projector_type="domino"), "projector_type 'domino'"),
    ("Domino, ", make_dflash(dflash_config={"projector_type": "domino"}), "projector_type 'domino'"),
]
TENSORS = [
    ("XPress, ", make_dflash(), "xpress_head.mix.L"),
    ("LiLiCorr, ", make_dflash(), "model.lilicorr.layers.0.up.weight"),
    ("Domino, ", make_dflash(), "prefix_gru.weight_ih_l0"),
    ("DeepSeek-V4's DSpark, ", make_v4(), "mtp.2.markov_head.markov_w1.weight"),
    ("multi-token prediction with an indexer", make_mtp(V3_CONFIG), "model.layers.2.self_attn.indexer.wk"),
    (
        "Qwen's multi-token prediction with hyper-con",
        make_mtp(QWEN_CONFIG),
        "mtp.hyper_connection_mixer.hc_norm.weight",
    ),
    ("MiMo-V2's multi-token prediction, ", make_mtp(QWEN_CONFIG), "model.mtp.layers.0.eh_proj.weight"),
]
"""A kind, a checkpoint of another one, and the tensor that makes it of this kind."""
UNSERVED = NAMED + [
    (kind, plain.changed(changes, {name: torch.ones(2, 3)}), f"tensor {name}")
    for kind, plain, name in TENSORS
    for changes in ({}, {"quantization_config": {"quant_method": "fp8"}})
]


def assert_named(folder, kind, evidence):
    """Where the draft is loaded, and where its target is about to be made."""
    target = StubTarget(target_states_size=2 * HIDDEN)
    for read in (lambda: load_draft(folder, target, dtype=torch.float32), lambda: aux_hidden_state_layers(folder, 8)):
        with pytest.raises(CheckpointError) as refused:
            read()
        message = str(refused.value)
        problem = f"{folder / 'config.json'} describes an unsupported kind of draft: {kind}"
        assert message.startswith(problem) and f" (found {evidence})" in message
        assert "DSpark (markov_head among its tensors)" in message


@pytest.mark.parametrize(("kind", "checkpoint", "evidence"), UNSERVED)
def test_unsupported_kind_is_named(tmp_path, kind, checkpoint, evidence):
    assert_named(checkpoint.write(tmp_path), kind, evidence)


def test_unsupported_speculators_kind_is_named():
    assert_named(FOLDERS / "xpress", "XPress, ", "speculators_model_type 'xpress'")

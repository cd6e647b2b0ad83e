"""How a DFlash checkpoint can be wrong, and what is said of it."""

import pytest
import torch

from spec_decode.models.checkpoints.files import CheckpointError
from spec_decode.models.load import aux_hidden_state_layers, load_draft
from tests.spec_decode.models.generated import HIDDEN, VOCAB, StubTarget, make_dflash

TARGET = StubTarget(target_states_size=2 * HIDDEN)


def load(checkpoint, folder, target=TARGET):
    return load_draft(checkpoint.write(folder), target, dtype=torch.float32)


def test_the_targets_layers_are_named_by_the_states_that_leave_them(tmp_path):
    folder = make_dflash(dflash_config={"target_layer_ids": [1, 7]}).write(tmp_path)
    assert aux_hidden_state_layers(folder, 8) == (2, 8)


@pytest.mark.parametrize("layers", [[], [8], [-1], ["1"], [1.5], [True]])
def test_layers_that_the_target_does_not_have_are_refused(layers, tmp_path):
    folder = make_dflash(dflash_config={"target_layer_ids": layers}).write(tmp_path)
    with pytest.raises(
        CheckpointError, match=r"target_layer_ids in dflash_config in .* must list layers of the target, 0 to 7, got "
    ):
        aux_hidden_state_layers(folder, 8)


def test_layers_that_the_target_has_not_are_refused_where_it_says_how_many_it_has(tmp_path):
    folder = make_dflash(dflash_config={"target_layer_ids": [99, 0]}).write(tmp_path)
    target = StubTarget(target_states_size=2 * HIDDEN)
    load_draft(folder, target, dtype=torch.float32)
    target.num_layers = 8
    with pytest.raises(CheckpointError, match=r"must list layers of the target, 0 to 7, got \[99, 0\]"):
        load_draft(folder, target, dtype=torch.float32)


WRONG = {
    "no mask token": (make_dflash(dflash_config={"mask_token_id": None}), "a DFlash draft predicts masks"),
    "a mask outside": (make_dflash(dflash_config={"mask_token_id": VOCAB}), f"0 to {VOCAB - 1}, got {VOCAB}"),
    "too few layer types": (make_dflash(layer_types=["full_attention"]), "for each of 2 layers"),
    "an unknown layer type": (make_dflash(layer_types=["full_attention", "linear"]), "layer_types in "),
    "a window of no width": (
        make_dflash(layer_types=["sliding_attention"] * 2, use_sliding_window=False),
        "must say how wide it is",
    ),
    "a window that is none": (make_dflash(dflash_config={"use_swa": True}), "must say how wide it is"),
    "more layers than are read": (make_dflash(num_states=3), "reads target hidden states of size 96"),
    "an anchor that is no truth value": (
        make_dflash(dflash_config={"sample_from_anchor": 1}),
        "sample_from_anchor in ",
    ),
    "a Markov head that is gated": (
        make_dflash(markov_rank=4, markov_head_type="gated"),
        "markov_head_type in .* must be 'vanilla', got 'gated'",
    ),
    "no word of the target's layers": (
        make_dflash(dflash_config={"target_layer_ids": None}),
        r"config\.json must say which of the target's layers the draft reads; none of .*, aux_hidden_state_layer_ids",
    ),
    "a Markov head of no rank": (make_dflash(markov_rank=4), "markov_rank in .* must be 1 or more, got 0"),
    "another hidden size without a head": (make_dflash(hidden_size=48, own_embedding=True), "for want of a head"),
    "causality that is no truth value": (make_dflash(is_causal="no"), "is_causal in .* must be true or false"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_checkpoint_is_refused_in_words(name, tmp_path):
    checkpoint, says = WRONG[name]
    if "of no rank" in name:
        checkpoint.config["markov_rank"] = 0
    with pytest.raises(CheckpointError, match=says):
        load(checkpoint, tmp_path)


def test_a_mask_embedding_beside_the_weights_is_refused(tmp_path):
    checkpoint = make_dflash()
    checkpoint.write(tmp_path)
    torch.save(torch.zeros(HIDDEN), tmp_path / "mask_embedding.pt")
    with pytest.raises(CheckpointError, match=r"holds mask_embedding\.pt"):
        load(checkpoint, tmp_path)

"""The mask token of drafts that predict a block at once, and how a checkpoint can be wrong about it."""

import pytest
import torch

from spec_decode.models.checkpoints.files import CheckpointError
from spec_decode.models.checkpoints.mask_token import read_mask_token
from spec_decode.models.checkpoints.store import TensorStore
from spec_decode.models.load import load_draft
from tests.spec_decode.models.generated import HIDDEN, VOCAB, StubTarget, make_causal, make_eagle3

TARGET = StubTarget(target_states_size=3 * HIDDEN)


def load(checkpoint, folder):
    return load_draft(checkpoint.write(folder), TARGET, dtype=torch.float32)


@pytest.mark.parametrize("key", ["mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id"])
def test_every_name_of_the_mask_token_is_read(key, tmp_path):
    assert read_mask_token(TensorStore.open(make_causal(**{key: 5}).write(tmp_path)), VOCAB) == 5


def test_dflashs_own_mask_token_goes_before_the_others(tmp_path):
    checkpoint = make_causal(mask_token_id=5, dflash_config={"mask_token_id": 6})
    assert read_mask_token(TensorStore.open(checkpoint.write(tmp_path)), VOCAB) == 6


def test_a_plain_language_model_has_none_and_drafts_a_token_a_step(tmp_path):
    assert not load(make_causal(), tmp_path).drafts_at_once


@pytest.mark.parametrize("token", [-1, VOCAB, 10**9])
def test_a_mask_token_outside_of_the_vocabulary_is_refused(token, tmp_path):
    with pytest.raises(CheckpointError, match=rf"pard_token .* 0 to {VOCAB - 1}, got {token}"):
        load(make_causal(pard_token=token), tmp_path)


@pytest.mark.parametrize("token", ["5", 5.0, True])
def test_a_mask_token_that_is_no_integer_is_refused(token, tmp_path):
    with pytest.raises(CheckpointError, match=r"pard_token .* must be an integer"):
        load(make_causal(pard_token=token), tmp_path)


def test_a_mask_state_without_a_mask_token_is_refused_by_every_name_that_was_looked_for(tmp_path):
    with pytest.raises(
        CheckpointError, match=r"dflash_config.mask_token_id, mask_token_id, .*pard_token, ptd_token_id"
    ):
        load(make_eagle3(mask=()), tmp_path)


def test_a_mask_state_of_another_size_is_refused(tmp_path):
    checkpoint = make_eagle3(mask=(), ptd_token_id=3)
    checkpoint.tensors["mask_hidden"] = torch.zeros(HIDDEN)
    with pytest.raises(CheckpointError, match=rf"mask_hidden .* must be \[{3 * HIDDEN}\], got \[{HIDDEN}\]"):
        load(checkpoint, tmp_path)

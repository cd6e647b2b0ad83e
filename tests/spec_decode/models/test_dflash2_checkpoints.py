"""How a DFlash2 checkpoint can be wrong, and what is said of it: the key and the file, before memory is asked for."""

import re

import pytest
import torch

from spec_decode.models import dflash2
from spec_decode.models.checkpoints.files import CheckpointError
from spec_decode.models.load import load_draft
from tests.spec_decode.models.generated import HIDDEN, VOCAB, Generated, StubTarget, make_dflash, make_dflash2

TARGET = StubTarget(target_states_size=2 * HIDDEN)
KEYS = ("block_size", "conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
TENSORS = {
    "layers.1.attention_conv.base_kernel": [2, 2, HIDDEN],
    "layers.0.attention_conv.kernel_projection.weight": [2 * 2 * 4, HIDDEN],
    "layers.0.mlp_conv.base_kernel": [2, 2, HIDDEN],
    "layers.1.mlp_conv.kernel_projection.weight": [2 * 2 * 4, HIDDEN],
    "candidate_selector.predecessor_codebook": [VOCAB, 6],
    "candidate_selector.successor_codebook": [VOCAB, 6],
    "candidate_selector.hidden_projection.weight": [6, HIDDEN],
}


def refusal(checkpoint, folder, target=TARGET):
    with pytest.raises(CheckpointError) as refused:
        load_draft(checkpoint.write(folder), target, dtype=torch.float32)
    return str(refused.value)


def without(tensor, checkpoint):
    return Generated(checkpoint.config, {name: kept for name, kept in checkpoint.tensors.items() if name != tensor})


@pytest.fixture
def unread(monkeypatch):
    """No tensor is read, and no memory asked for, before the config is known to be right."""
    monkeypatch.setattr("spec_decode.models.dflash.read_parameters", lambda *_: pytest.fail("parameters were read"))


WRONG_SIZES = {
    "no taps": ({"conv_kernel_size": 0}, "conv_kernel_size in {place} must be 1 to 8, got 0"),
    "more taps than a block has tokens": ({"conv_kernel_size": 9}, "conv_kernel_size in {place} must be 1 to 8, got 9"),
    "no block": ({"block_size": 0}, "block_size in {place} must be 1 to 4096, got 0"),
    "no group": ({"conv_group_size": 0}, f"conv_group_size in {{place}} must be 1 to {HIDDEN}, got 0"),
    "a group that is left over": ({"conv_group_size": 5}, f"must divide hidden_size {HIDDEN}, got 5"),
    "a group beyond": ({"conv_group_size": 2 * HIDDEN}, f"conv_group_size in {{place}} must be 1 to {HIDDEN}, got 64"),
    "no rank": ({"selector_rank": 0}, "selector_rank in {place} must be 1 to 4096, got 0"),
    "no candidate": ({"selector_top_k": 0}, f"selector_top_k in {{place}} must be 1 to {VOCAB}, got 0"),
    "more candidates than tokens": (
        {"selector_top_k": VOCAB + 1},
        f"selector_top_k in {{place}} must be 1 to {VOCAB}, got {VOCAB + 1}",
    ),
    "a rank that is no number": ({"selector_rank": "6"}, "selector_rank in {place} must be an integer, got '6'"),
}


@pytest.mark.parametrize(("sizes", "says"), WRONG_SIZES.values(), ids=WRONG_SIZES)
def test_a_wrong_size_is_refused_by_its_key_and_file(sizes, says, tmp_path, unread):
    place = f"dflash_config in {tmp_path / 'config.json'}"
    assert says.format(place=place) in refusal(make_dflash2(sizes=sizes), tmp_path)


@pytest.mark.parametrize("key", KEYS)
def test_a_size_that_is_left_out_is_refused_by_its_key_and_file(key, tmp_path, unread):
    message = refusal(make_dflash2(sizes={key: None}), tmp_path)
    assert message.startswith(f"dflash_config in {tmp_path / 'config.json'} must say {key}, an integer")


def test_more_candidates_than_a_kernel_holds_are_refused(tmp_path, unread):
    target = StubTarget(vocab_size=99, target_states_size=2 * HIDDEN)
    message = refusal(make_dflash2(vocab_size=99, sizes={"selector_top_k": 65}), tmp_path, target)
    assert "selector_top_k in " in message and "must be 1 to 64, got 65" in message


def test_sizes_at_the_top_of_the_config_are_read_too(tmp_path):
    nested = make_dflash2()
    sizes = {key: nested.config["dflash_config"].pop(key) for key in KEYS}
    flat = Generated(nested.config | sizes, nested.tensors)
    assert load_draft(flat.write(tmp_path), TARGET, dtype=torch.float32).num_candidates == 5


@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_that_is_missing_or_of_another_shape_is_refused_by_its_name_and_file(name, tmp_path):
    checkpoint, shape = make_dflash2(), TENSORS[name]
    assert list(checkpoint.tensors[name].shape) == shape
    message = refusal(without(name, checkpoint), tmp_path / "missing")
    assert name in message and str(tmp_path / "missing") in message
    cut = Generated(checkpoint.config, checkpoint.tensors | {name: checkpoint.tensors[name][..., 1:].contiguous()})
    message = refusal(cut, tmp_path / "cut")
    assert re.search(
        rf"^{re.escape(name)} in {re.escape(str(tmp_path / 'cut'))}.* must be {re.escape(str(shape))}, got", message
    )


def test_a_vocabulary_of_its_own_is_refused(tmp_path, unread):
    message = refusal(make_dflash2(draft_vocab=24), tmp_path)
    assert message.startswith(
        f"draft_vocab_size in {tmp_path / 'config.json'} must be the target's {VOCAB}, got 24 and a d2t"
    )


def test_a_draft_that_is_called_dflash2_and_has_none_of_its_tensors_is_not_taken_for_a_dflash(tmp_path):
    plain = make_dflash(architectures=["DFlash2DraftModel"])
    assert "must say" in refusal(plain, tmp_path / "sizes")
    sized = Generated(make_dflash2().config, plain.tensors)
    assert "attention_conv.base_kernel" in refusal(sized, tmp_path / "tensors")


def test_its_tensors_tell_it_by_whatever_name_it_goes(tmp_path):
    checkpoint = make_dflash2()
    named = Generated(checkpoint.config | {"architectures": ["DFlashDraftModel"]}, checkpoint.tensors)
    assert type(load_draft(named.write(tmp_path), TARGET, dtype=torch.float32)) is dflash2.DFlash2


def test_a_tensor_that_it_has_no_place_for_is_refused(tmp_path):
    checkpoint = make_dflash2()
    more = Generated(checkpoint.config, checkpoint.tensors | {"candidate_selector.bias": torch.ones(3)})
    assert "no place for: candidate_selector.bias" in refusal(more, tmp_path)

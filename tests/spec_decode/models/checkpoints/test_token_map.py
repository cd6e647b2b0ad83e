import pytest
import torch

from spec_decode.models import CheckpointError
from spec_decode.models.checkpoints.store import TensorStore
from spec_decode.models.checkpoints.token_map import read_token_map
from tests.spec_decode.models.generated import Generated, make_maps


def read(folder, tensors, draft_vocab=6, target_vocab=10):
    return read_token_map(TensorStore.open(Generated({}, tensors).write(folder)), draft_vocab, target_vocab)


def refusal(folder, tensors, **sizes):
    with pytest.raises(CheckpointError) as refused:
        read(folder, tensors, **sizes)
    return str(refused.value)


def maps_of(ids, marked=None, target_vocab=10):
    reached = torch.zeros(target_vocab, dtype=torch.bool)
    reached[list(ids if marked is None else marked)] = True
    return {"d2t": torch.tensor(ids) - torch.arange(len(ids)), "t2d": reached}


def test_offsets_become_ids_of_the_target(tmp_path):
    assert read(tmp_path, maps_of([0, 2, 3, 5, 8, 9])).tolist() == [0, 2, 3, 5, 8, 9]


def test_ids_need_not_ascend(tmp_path):
    assert read(tmp_path, maps_of([9, 0, 4, 2, 8, 1])).tolist() == [9, 0, 4, 2, 8, 1]


def test_the_marks_may_be_left_out(tmp_path):
    maps = make_maps(6, 10)
    assert read(tmp_path, {"d2t": maps["d2t"]}).tolist() == maps["t2d"].nonzero().flatten().tolist()


def test_a_vocabulary_that_is_the_targets_needs_no_map(tmp_path):
    assert read(tmp_path, {"a": torch.ones(1)}, draft_vocab=10) is None


def test_a_reduced_vocabulary_without_a_map_is_refused(tmp_path):
    assert "must hold a tensor d2t" in refusal(tmp_path, {"a": torch.ones(1)})


def test_a_map_of_another_number_of_tokens_is_refused_with_both(tmp_path):
    assert "must be [7], got [6]" in refusal(tmp_path, make_maps(6, 10), draft_vocab=7)


@pytest.mark.parametrize("outside", [10, -1])
def test_an_id_out_of_range_is_named(tmp_path, outside):
    maps = {**maps_of([0, 2, 3, 5, 8, 9])}
    maps["d2t"][4] = outside - 4
    message = refusal(tmp_path, maps)
    assert f"1 map outside the target's vocabulary, the first is 4 to {outside}" in message


def test_an_id_mapped_to_several_times_is_named(tmp_path):
    message = refusal(tmp_path, maps_of([0, 2, 5, 5, 5, 9]))
    assert "1 of the target's are mapped to several times, the first is 5, 3 times" in message


def test_too_many_marks_are_counted(tmp_path):
    message = refusal(tmp_path, maps_of([0, 2, 3, 5, 8, 9], marked=[0, 1, 2, 3, 5, 8, 9]))
    assert "t2d marks 7 tokens, not 6" in message


def test_maps_that_disagree_are_refused_with_the_first_id(tmp_path):
    message = refusal(tmp_path, maps_of([0, 2, 3, 5, 8, 9], marked=[0, 2, 3, 4, 7, 9]))
    assert "t2d does not mark 2 that d2t maps to, the first is 5" in message


def test_marks_of_another_vocabulary_are_refused_with_both(tmp_path):
    assert "must be [10], got [12]" in refusal(tmp_path, maps_of([0, 2, 3, 5, 8, 9], target_vocab=12))

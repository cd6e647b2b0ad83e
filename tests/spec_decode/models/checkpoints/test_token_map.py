import re

import pytest
import torch

from spec_decode.models import CheckpointError
from spec_decode.models.checkpoints.store import TensorStore
from spec_decode.models.checkpoints.token_map import read_token_map
from tests.spec_decode.models.generated import Generated

IDS = [0, 2, 3, 5, 8, 9]


def read(folder, tensors, draft_vocab=6):
    store = TensorStore.open(Generated({}, tensors).write(folder))
    return read_token_map(store, draft_vocab, 10, 10, torch.device("cpu"))


def maps_of(ids, marked=None, target_vocab=10):
    """Of 6 tokens into 10; the target's tokens that are marked, those of the map where they are not said."""
    reached = torch.zeros(target_vocab, dtype=torch.bool)
    reached[[i for i in ids if 0 <= i < target_vocab] if marked is None else marked] = True
    return {"d2t": torch.tensor(ids) - torch.arange(len(ids)), "t2d": reached}


def test_offsets_become_target_ids(tmp_path):
    """The marks may be left out, and a vocabulary that is the target's needs no map."""
    assert read(tmp_path, maps_of(IDS)).tolist() == IDS
    assert read(tmp_path, {"d2t": maps_of(IDS)["d2t"]}).tolist() == IDS
    assert read(tmp_path, maps_of([9, 0, 4, 2, 8, 1])).tolist() == [9, 0, 4, 2, 8, 1]
    assert read(tmp_path, {"a": torch.ones(1)}, draft_vocab=10) is None


WRONG = {
    "no map": ({"a": torch.ones(1)}, "lacks the tensor d2t"),
    "another number of tokens": (maps_of(IDS[1:]), "must be [6], got [5]"),
    "an id beyond": (maps_of([0, 2, 3, 5, 10, 9]), "1 map outside the target's vocabulary, first 4 to 10"),
    "a negative id": (maps_of([0, 2, 3, 5, -1, 9]), "1 map outside the target's vocabulary, first 4 to -1"),
    "an id several times": (
        maps_of([0, 2, 5, 5, 5, 9]),
        "1 of the target's are mapped to repeatedly, first 5, 3 times",
    ),
    "too many marks": (maps_of(IDS, [0, 1, *IDS[1:]]), "t2d marks 7 tokens, not 6"),
    "marks of other tokens": (maps_of(IDS, [0, 2, 3, 4, 7, 9]), "t2d does not mark 2 that d2t maps to, first 5"),
    "marks of another vocabulary": (maps_of(IDS, target_vocab=12), "must be [10], got [12]"),
}


@pytest.mark.parametrize(("tensors", "message"), WRONG.values(), ids=WRONG)
def test_invalid_map_is_rejected_with_first_id(tmp_path, tensors, message):
    with pytest.raises(CheckpointError, match=re.escape(message)):
        read(tmp_path, tensors)

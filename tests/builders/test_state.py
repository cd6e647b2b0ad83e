import pytest
import torch

from builders import BatchBuffers, BatchError, Recurrence, RequestTables, SpecError, StateBuilder, StateSpec
from tests.factories import CPU

SIZES = {"num_key_heads": 2, "num_value_heads": 4, "key_dim": 16, "value_dim": 8, "journal": 8}
BROKEN = {
    "no key heads": ({"num_key_heads": 0}, "num_key_heads must be at least 1, got 0"),
    "keys without a matrix": (
        {"recurrence": Recurrence.CONV, "num_key_heads": 0},
        "key_dim must be 0 for conv, which has no keys, got 16",
    ),
    "no journal": ({"journal": 0}, "journal must be at least 1, got 0"),
    "no convolution": ({"conv_width": 0}, "conv_width must be at least 1, got 0"),
    "heads do not group": ({"num_value_heads": 3}, "must be a multiple of num_key_heads, got 3 and 2"),
    "a recurrence as a string": ({"recurrence": "kda"}, "recurrence must be of type Recurrence, got 'kda'"),
    "half a journal": ({"journal": 7.5}, "journal must be an int, got 7.5"),
    "an integer dtype": ({"dtype": torch.int8}, "dtype must be a floating-point dtype, got torch.int8"),
    "an integer state": ({"state_dtype": torch.int8}, "state_dtype must be a floating-point dtype, got torch.int8"),
}


@pytest.mark.parametrize(("changes", "words"), BROKEN.values(), ids=BROKEN)
def test_invalid_spec_is_refused(changes, words):
    with pytest.raises(SpecError, match=f"this StateSpec is invalid: .*{words}"):
        StateSpec(**{**SIZES, **changes})


def test_spec_lists_every_problem():
    with pytest.raises(SpecError, match=r"key_dim must .*journal must "):
        StateSpec(**{**SIZES, "key_dim": 0, "journal": -1})


@pytest.fixture
def batch():
    """Two requests in slots 5 and 2, with 3 query tokens each, in a table of two groups."""
    tables = RequestTables(page_sizes=[64, 4], num_pages=[6, 32], max_reqs=3, max_seq_len=64, device=CPU)
    tables.load([[[5], [2]], [[*range(16)], [*range(16, 32)]]], [64, 64])
    buffers = BatchBuffers(tables, max_tokens=9)
    buffers.load([3, 3], [10, 20], pad_reqs=3)
    return buffers


def view_of(buffers, **changes):
    return buffers.view(0, **{"num_reqs": 3, "num_tokens": 9, "max_query_len": 3, **changes})


def builder(**changes):
    return StateBuilder(StateSpec(**{**SIZES, **changes}), CPU, max_reqs=3, max_tokens=9, max_seq_len=64)


def test_metadata_is_views_of_the_batch(batch):
    metadata = builder().build(view_of(batch), horizon=63)
    batch.tables.condense([1])
    batch.seq_lens.fill_(7)
    assert metadata.slots.tolist() == [2, -1, -1] and metadata.seq_lens.tolist() == [7, 7, 7]


REFUSED = {
    "a step beyond the journal": (
        {"journal": 2},
        {},
        "the 3 query tokens of a step and a reserve of 0, got 2",
    ),
    "a reserve beyond the journal": ({}, {"reserve": 6}, "the 3 query tokens of a step and a reserve of 6, got 8"),
    "a negative reserve": ({}, {"reserve": -1}, "a reserve of -1"),
    "a reserve that is no count": ({}, {"reserve": 1.0}, "reserves must be ints, got 1.0"),
    "a horizon beyond every length": ({}, {"horizon": 64}, "horizon must be less than the 64 tokens"),
}


@pytest.mark.parametrize(("spec", "how", "words"), REFUSED.values(), ids=REFUSED)
def test_step_that_would_lose_a_state_is_refused(batch, spec, how, words):
    with pytest.raises(BatchError, match=words):
        builder(**spec).build(view_of(batch), **how)


def test_prompt_needs_no_journal(batch):
    assert builder(journal=1).build(view_of(batch), absorb=True).absorb


@pytest.mark.parametrize(("tree", "absorb"), [(False, False), (True, True)])
def test_unannounced_or_certain_tree_is_refused(batch, tree, absorb):
    view = batch.tree_view(view_of(batch))
    with pytest.raises(BatchError, match=f"got tree={tree}, absorb={absorb} and 3"):
        builder(tree=tree).build(view, absorb=absorb)
    assert builder(tree=True).build(view).tree_masks is not None

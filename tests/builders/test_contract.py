import pytest

from builders import (
    AdvanceLevel,
    AdvanceSupport,
    BatchBuffers,
    BatchError,
    CaptureConstants,
    GraphSupport,
    MetadataBuilder,
    ReferenceBuilder,
    TritonPagedBuilder,
)
from tests.factories import CPU, make_spec, make_tables


def claim_of(builder):
    return builder.advance_support(make_spec(), CPU)


@pytest.mark.parametrize("base", [ReferenceBuilder, TritonPagedBuilder])
def test_a_subclass_that_overrides_build_loses_the_inherited_claim_unless_it_states_it_again(base):
    class Changed(base):
        def build(self, batch, *, horizon=0):
            return super().build(batch, horizon=horizon)

    class Further(Changed):
        pass

    class Restated(Changed):
        @classmethod
        def advance_support(cls, spec, device):
            return AdvanceSupport(AdvanceLevel.IN_GRAPH, "still true")

    class Renamed(base):
        pass

    levels = [claim_of(builder).level for builder in (Changed, Further, Restated, Renamed, base)]
    assert levels == [AdvanceLevel.REBUILD] * 2 + [AdvanceLevel.IN_GRAPH] * 3
    assert "Changed overrides build()" in claim_of(Changed).reason and claim_of(Restated).reason == "still true"


class Replanned(MetadataBuilder):
    """Claims no advance, and defines none."""

    graph_support, step_fields = GraphSupport.ALWAYS, ()

    @classmethod
    def advance_support(cls, spec, device):
        return AdvanceSupport(AdvanceLevel.REBUILD, "plans on the host")

    def build(self, batch, *, horizon=0):
        self.check_horizon(batch, horizon)
        return batch

    def capture_constants(self, metadata):
        return constants()


def test_a_builder_that_claims_no_advance_need_not_define_one():
    builder = Replanned(make_spec(), CPU, max_reqs=1, max_tokens=1, max_seq_len=8)
    with pytest.raises(BatchError, match=r"a builder that defines advance\(\), Replanned does not;"):
        builder.advance(None)


@pytest.mark.parametrize("bound", ["max_reqs", "max_tokens", "max_seq_len"])
def test_a_batch_beyond_a_builders_bounds_is_refused_at_build(bound):
    buffers = BatchBuffers(make_tables([30, 30], max_seq_len=32), max_tokens=4)
    buffers.load([2, 2], [5, 6])
    view = buffers.view(0, num_reqs=2, num_tokens=4, max_query_len=2)
    bounds = {"max_reqs": 2, "max_tokens": 4, "max_seq_len": 32}
    Replanned(make_spec(), CPU, **bounds).build(view)
    with pytest.raises(BatchError, match="got a batch of 2, 4 and up to 32; a kernel would leave them"):
        Replanned(make_spec(), CPU, **{**bounds, bound: bounds[bound] - 1}).build(view)


def constants(**changes):
    return CaptureConstants(**{"max_reqs": 4, "max_query_len": 2, "max_seq_len": 64, **changes})


def test_every_constant_that_a_replay_exceeds_is_named_with_both_numbers():
    assert constants().exceeded_by(constants()) == []
    assert constants().exceeded_by(constants(max_reqs=1, max_query_len=1, max_seq_len=1)) == []
    assert constants().exceeded_by(constants(max_reqs=5, max_query_len=3, max_seq_len=65)) == [
        "max_reqs: captured with 4, needed 5",
        "max_query_len: captured with 2, needed 3",
        "max_seq_len: captured with 64, needed 65",
    ]


def test_levels_are_ordered_from_most_work_to_least():
    assert AdvanceLevel.REBUILD < AdvanceLevel.PREPLANNED < AdvanceLevel.IN_GRAPH

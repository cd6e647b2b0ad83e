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
def test_a_subclass_that_overrides_build_loses_the_inherited_claim(base):
    class Changed(base):
        def build(self, batch, *, horizon=0):
            return super().build(batch, horizon=horizon)

    assert claim_of(Changed).level is AdvanceLevel.REBUILD
    assert "Changed overrides build()" in claim_of(Changed).reason


def test_a_subclass_that_states_the_claim_again_keeps_it():
    class Restated(ReferenceBuilder):
        def build(self, batch, *, horizon=0):
            return super().build(batch, horizon=horizon)

        @classmethod
        def advance_support(cls, spec, device):
            return AdvanceSupport(AdvanceLevel.IN_GRAPH, "still true")

    assert claim_of(Restated) == AdvanceSupport(AdvanceLevel.IN_GRAPH, "still true")


def test_a_subclass_that_leaves_build_alone_keeps_the_claim():
    class Renamed(ReferenceBuilder):
        pass

    assert claim_of(Renamed).level is AdvanceLevel.IN_GRAPH


def test_the_parents_claim_is_untouched_by_a_subclass():
    class Changed(ReferenceBuilder):
        def build(self, batch, *, horizon=0):
            return super().build(batch, horizon=horizon)

    assert claim_of(ReferenceBuilder).level is AdvanceLevel.IN_GRAPH


def test_a_lost_claim_is_inherited_further():
    class Changed(ReferenceBuilder):
        def build(self, batch, *, horizon=0):
            return super().build(batch, horizon=horizon)

    class Further(Changed):
        pass

    assert claim_of(Further).level is AdvanceLevel.REBUILD


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


def test_a_replay_may_need_less_of_everything():
    assert constants().exceeded_by(constants(max_reqs=1, max_query_len=1, max_seq_len=1)) == []


def test_a_replay_may_need_just_as_much():
    assert constants().exceeded_by(constants()) == []


@pytest.mark.parametrize("name", ["max_reqs", "max_query_len", "max_seq_len"])
def test_a_constant_that_is_exceeded_is_named_with_both_numbers(name):
    captured = getattr(constants(), name)
    problems = constants().exceeded_by(constants(**{name: captured + 1}))
    assert problems == [f"{name}: captured with {captured}, needed {captured + 1}"]


def test_every_exceeded_constant_is_named():
    assert len(constants().exceeded_by(constants(max_reqs=9, max_query_len=9, max_seq_len=99))) == 3


def test_levels_are_ordered_from_most_work_to_least():
    assert AdvanceLevel.REBUILD < AdvanceLevel.PREPLANNED < AdvanceLevel.IN_GRAPH

"""What every builder rejects, claims and declares, and the requirements on a kernel's operands."""

import pytest
import torch

from attn_backends import get
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
from builders.errors import require_tensor
from tests.factories import CPU, make_spec, make_tables


def claim_of(builder):
    return builder.advance_support(make_spec(), CPU)


@pytest.mark.parametrize("base", [ReferenceBuilder, TritonPagedBuilder])
def test_overriding_build_drops_inherited_claim(base):
    """A subclass that overrides build() must state its claim again."""

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


def test_rebuild_builder_needs_no_advance():
    builder = Replanned(make_spec(), CPU, max_reqs=1, max_tokens=1, max_seq_len=8)
    with pytest.raises(BatchError, match=r"a builder must define advance\(\) to advance metadata, Replanned does not;"):
        builder.advance(None)


@pytest.mark.parametrize("bound", ["max_reqs", "max_tokens", "max_seq_len"])
def test_batch_beyond_builder_bounds_is_rejected(bound):
    buffers = BatchBuffers(make_tables([30, 30], max_seq_len=32), max_tokens=4)
    buffers.load([2, 2], [5, 6])
    view = buffers.view(0, num_reqs=2, num_tokens=4, max_query_len=2)
    bounds = {"max_reqs": 2, "max_tokens": 4, "max_seq_len": 32}
    Replanned(make_spec(), CPU, **bounds).build(view)
    with pytest.raises(BatchError, match="got a batch of 2, 4 and up to 32; kernels would overrun them"):
        Replanned(make_spec(), CPU, **{**bounds, bound: bounds[bound] - 1}).build(view)


BACKENDS = ("torch_reference", "triton_paged", "triton_mla", "sparse_swa_mla")


@pytest.mark.parametrize("rows", [0, 1])
@pytest.mark.parametrize("name", BACKENDS)
def test_an_empty_batch_is_refused_at_build(name, rows):
    buffers = BatchBuffers(make_tables([30], max_seq_len=32), max_tokens=4)
    spec = make_spec(num_kv_heads=1, sliding_window=8)
    builder = get(name).builder(spec, CPU, max_reqs=1, max_tokens=4, max_seq_len=32)
    with pytest.raises(BatchError, match=f"a batch must have a row and a query token, got {rows} and 0"):
        builder.build(buffers.view(0, num_reqs=rows, num_tokens=0, max_query_len=1, uniform=False))


@pytest.mark.parametrize("name", BACKENDS)
def test_invalid_horizon_is_rejected_at_build(name):
    buffers = BatchBuffers(make_tables([30], max_seq_len=32), max_tokens=4)
    buffers.load([1], [5])
    spec = make_spec(num_kv_heads=1, sliding_window=8)
    builder = get(name).builder(spec, CPU, max_reqs=1, max_tokens=4, max_seq_len=32)
    view = buffers.view(0, num_reqs=1, num_tokens=1, max_query_len=1)
    assert builder.build(view, horizon=31).num_reqs == 1
    for horizon in (-1, 32):
        message = rf"less than the 32 tokens in a request's 8 pages, got {horizon}; .* run out of pages"
        with pytest.raises(BatchError, match=message):
            builder.build(view, horizon=horizon)
    for horizon in (1.5, "2", True):
        with pytest.raises(BatchError, match=f"horizons must be ints, got {horizon!r}"):
            builder.build(view, horizon=horizon)


class Elsewhere:
    """As much of a tensor as the check asks for, on a device that need not be here."""

    def __init__(self, device):
        self.shape, self.dtype, self.device = torch.Size([2]), torch.float32, torch.device(device)


def test_device_without_index_matches_any_of_its_type():
    def required_on(device, tensor_device):
        require_tensor("x", Elsewhere(tensor_device), shape=(2,), dtype=torch.float32, device=torch.device(device))

    for wanted, found in (("cuda", "cuda:1"), ("cpu:0", "cpu"), ("cuda:1", "cuda:1")):
        required_on(wanted, found)
    with pytest.raises(BatchError, match=r"x must be torch\.float32 \[2\] on cuda:0, got .* on cuda:1; a kernel"):
        required_on("cuda:0", "cuda:1")


def constants(**changes):
    return CaptureConstants(**{"max_reqs": 4, "max_query_len": 2, "max_seq_len": 64, **changes})


def test_exceeded_constants_are_named_with_both_numbers():
    assert constants().exceeded_by(constants()) == []
    assert constants().exceeded_by(constants(max_reqs=1, max_query_len=1, max_seq_len=1)) == []
    assert constants().exceeded_by(constants(max_reqs=5, max_query_len=3, max_seq_len=65)) == [
        "max_reqs: captured with 4, needed 5",
        "max_query_len: captured with 2, needed 3",
        "max_seq_len: captured with 64, needed 65",
    ]


def test_advance_levels_are_ordered_by_host_work():
    assert AdvanceLevel.REBUILD < AdvanceLevel.PREPLANNED < AdvanceLevel.IN_GRAPH

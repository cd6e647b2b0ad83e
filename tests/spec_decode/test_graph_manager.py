import pytest
import torch

from builders import BatchError, CaptureConstants
from spec_decode.graphs import Capturable, CaptureError, GraphKey, GraphManager
from tests.factories import CPU

ROOMY = CaptureConstants(max_reqs=8, max_query_len=1, max_seq_len=64)


class Work:
    """A factory that keeps count; its graph adds the size to `total`."""

    def __init__(self, constants=ROOMY):
        self.total, self.made, self.constants = torch.zeros(1), [], constants

    def __call__(self, size):
        self.made.append(size)
        return Capturable(lambda: self.total.add_(size), self.constants)


def captured(sizes=(1, 2, 4), **kinds):
    manager = GraphManager(CPU, sizes)
    manager.capture(kinds)
    return manager


def test_the_largest_size_is_captured_first():
    manager = captured(sizes=(2, 8, 4), step=Work())
    assert [report.key.num_reqs for report in manager.reports] == [8, 4, 2]


def test_every_kind_is_captured_at_every_size():
    manager = captured(sizes=(1, 2), step=Work(), extend=Work())
    keys = {GraphKey(kind, size) for kind in ("step", "extend") for size in (1, 2)}
    assert {report.key for report in manager.reports} == keys and len(manager.reports) == 4


def test_a_factory_is_called_for_the_warm_up_and_again_for_the_capture():
    work = Work()
    captured(step=work)
    assert work.made == [4, 4, 2, 2, 1, 1]


def test_the_warm_up_runs_and_the_capture_does_not():
    work = Work()
    captured(step=work)
    assert work.total.tolist() == [7]


def test_nothing_of_the_warm_up_is_baked_in():
    tensors = []

    def factory(size):
        tensors.append(torch.zeros(1))
        return Capturable(lambda x=tensors[-1]: x.add_(1), ROOMY)

    captured(sizes=(1,), step=factory).replay(GraphKey("step", 1), ROOMY)
    assert [x.tolist() for x in tensors] == [[1], [1]]


@pytest.mark.parametrize(("num_reqs", "size"), [(1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (8, 8)])
def test_a_batch_is_padded_to_the_next_captured_size(num_reqs, size):
    assert GraphManager(CPU, [8, 1, 4, 2]).padded(num_reqs) == size


def test_a_batch_above_the_largest_size_is_refused_with_both_numbers():
    with pytest.raises(BatchError, match="largest captured batch is 4 requests, got 5"):
        GraphManager(CPU, [1, 4]).padded(5)


@pytest.mark.parametrize("sizes", [[], [0], [4, -1]])
def test_sizes_that_are_no_number_of_requests_are_refused(sizes):
    with pytest.raises(BatchError, match="capture sizes must be at least one"):
        GraphManager(CPU, sizes)


def test_a_size_given_twice_is_captured_once():
    assert len(captured(sizes=(2, 2), step=Work()).reports) == 1


def test_a_replay_runs_the_graph_of_its_key():
    work = Work()
    manager = captured(step=work)
    work.total.zero_()
    manager.replay(GraphKey("step", 2), ROOMY)
    assert work.total.tolist() == [2]


@pytest.mark.parametrize("name", ["max_reqs", "max_query_len", "max_seq_len"])
def test_a_replay_past_a_capture_constant_is_refused_and_not_run(name):
    work = Work()
    manager = captured(step=work)
    work.total.zero_()
    fields = {field: getattr(ROOMY, field) for field in ("max_reqs", "max_query_len", "max_seq_len")}
    needed = CaptureConstants(**{**fields, name: fields[name] + 1})
    with pytest.raises(
        BatchError, match=f"{name}: captured with {fields[name]}, needed {fields[name] + 1}.*step graph of 2"
    ):
        manager.replay(GraphKey("step", 2), needed)
    assert work.total.tolist() == [0]


def test_each_graph_keeps_the_constants_it_was_captured_with():
    tight = CaptureConstants(max_reqs=8, max_query_len=1, max_seq_len=8)
    manager = captured(roomy=Work(), tight=Work(tight))
    manager.replay(GraphKey("roomy", 1), ROOMY)
    with pytest.raises(BatchError):
        manager.replay(GraphKey("tight", 1), ROOMY)


def test_a_report_says_what_a_graph_cost():
    report = captured(sizes=(1,), step=Work()).reports[0]
    assert (report.key, report.bytes, report.num_nodes) == (GraphKey("step", 1), 0, 1) and report.seconds >= 0


def test_release_drops_every_graph_and_report():
    manager = captured(step=Work())
    manager.release()
    assert manager.reports == []
    with pytest.raises(KeyError):
        manager.replay(GraphKey("step", 1), ROOMY)


def test_graphs_can_be_captured_anew_after_a_release():
    work, manager = Work(), GraphManager(CPU, [1])
    manager.capture({"step": work})
    manager.release()
    manager.capture({"step": work})
    work.total.zero_()
    manager.replay(GraphKey("step", 1), ROOMY)
    assert work.total.tolist() == [1] and len(manager.reports) == 1


def test_a_function_that_reads_the_host_is_refused_at_capture():
    def factory(size):
        return Capturable(lambda: torch.zeros(1).item(), ROOMY)

    with pytest.raises(CaptureError):
        captured(step=factory)

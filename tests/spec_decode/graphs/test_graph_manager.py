"""Graphs of several kinds and sizes: their capture order, which one serves a batch, and their memory."""

from dataclasses import replace

import pytest
import torch

from builders import BatchError, CaptureConstants
from spec_decode.graphs import Capturable, CaptureError, GraphKey, GraphManager
from spec_decode.graphs.emulator import EmulatedRuntime
from tests.factories import CPU

ROOMY = CaptureConstants(max_reqs=8, max_query_len=1, max_seq_len=64)


class Work:
    """A factory that keeps count; its graph adds the size to `total`."""

    def __init__(self, constants=ROOMY):
        self.total, self.sizes, self.constants = torch.zeros(1), [], constants

    def __call__(self, size):
        self.sizes.append(size)
        return Capturable(lambda: self.total.add_(size), self.constants)


def captured(sizes=(1, 2, 4), **kinds):
    manager = GraphManager(CPU, sizes)
    manager.capture(kinds)
    return manager


def test_largest_size_is_captured_first_and_each_once():
    manager = captured(sizes=(2, 8, 4, 2), step=Work())
    assert [report.key.num_reqs for report in manager.reports] == [8, 4, 2]


def test_every_kind_is_captured_at_every_size():
    manager = captured(sizes=(1, 2), step=Work(), step_0=Work())
    keys = {GraphKey(kind, size) for kind in ("step", "step_0") for size in (1, 2)}
    assert {report.key for report in manager.reports} == keys and len(manager.reports) == 4


def test_factory_is_called_for_warm_up_and_capture():
    work = Work()
    captured(step=work)
    assert work.sizes == [4, 4, 2, 2, 1, 1] and work.total.tolist() == [7]


def test_warm_up_tensors_are_not_captured():
    tensors = []

    def factory(size):
        tensors.append(torch.zeros(1))
        return Capturable(lambda x=tensors[-1]: x.add_(1), ROOMY)

    captured(sizes=(1,), step=factory).replay(GraphKey("step", 1), ROOMY)
    assert [x.tolist() for x in tensors] == [[1], [1]]


def test_batch_is_padded_to_next_captured_size():
    manager = GraphManager(CPU, [8, 1, 4, 2])
    assert [manager.padded(num_reqs) for num_reqs in range(1, 9)] == [1, 2, 4, 4, 8, 8, 8, 8]
    with pytest.raises(BatchError, match="largest captured batch is 8 requests, got 9"):
        manager.padded(9)


@pytest.mark.parametrize("sizes", [[], [0], [4, -1]])
def test_invalid_capture_sizes_are_rejected(sizes):
    with pytest.raises(BatchError, match="capture sizes must be at least one"):
        GraphManager(CPU, sizes)


def test_replay_runs_graph_of_its_key():
    work = Work()
    manager = captured(step=work)
    work.total.zero_()
    manager.replay(GraphKey("step", 2), ROOMY)
    assert work.total.tolist() == [2]


@pytest.mark.parametrize("name", ["max_reqs", "max_query_len", "max_seq_len"])
def test_replay_beyond_capture_constant_is_rejected(name):
    work, most = Work(), getattr(ROOMY, name)
    manager = captured(step=work)
    work.total.zero_()
    with pytest.raises(BatchError, match=f"{name}: captured with {most}, needed {most + 1}.*step graph of 2"):
        manager.replay(GraphKey("step", 2), replace(ROOMY, **{name: most + 1}))
    assert work.total.tolist() == [0]


def test_each_graph_keeps_its_capture_constants():
    roomy, tight = Work(), Work(CaptureConstants(max_reqs=8, max_query_len=1, max_seq_len=8))
    manager = captured(roomy=roomy, tight=tight)
    manager.replay(GraphKey("roomy", 1), ROOMY)
    with pytest.raises(BatchError):
        manager.replay(GraphKey("tight", 1), ROOMY)


def test_report_states_cost_of_graph():
    report = captured(sizes=(1,), step=Work()).reports[0]
    assert (report.key, report.bytes, report.num_nodes) == (GraphKey("step", 1), 0, 1) and report.seconds >= 0


def test_release_drops_graphs_and_capture_remakes_them():
    work = Hungry()
    manager = captured(sizes=(1,), step=work)
    before = manager.bytes_used
    manager.release()
    assert manager.reports == [] and not manager.complete and before > manager.bytes_used == 0
    with pytest.raises(BatchError, match="no captured graph of kind step for 1 requests"):
        manager.replay(GraphKey("step", 1), ROOMY)
    manager.capture({"step": work})
    work.total.zero_()
    manager.replay(GraphKey("step", 1), ROOMY)
    assert work.total.tolist() == [2] and manager.bytes_used == before


class Hungry(Work):
    """Its graph keeps 4 bytes a row, and as much again whatever the size."""

    def __call__(self, size):
        self.sizes.append(size)
        return Capturable(lambda: self.total.add_(torch.ones(size + 1).sum()), self.constants)


def taken(manager):
    return {report.key.num_reqs: report.bytes for report in manager.reports}


def test_smaller_size_is_estimated_from_largest():
    manager = captured(sizes=(2, 4, 8), step=Hungry())
    largest = taken(manager)[8]
    assert [report.estimated_bytes for report in manager.reports] == [None, largest // 2, largest // 4]
    assert manager.estimate("step", 2) == largest // 4 and manager.estimate("other", 2) is None


def limited(limit, sizes=(1, 2, 4, 8), **kinds):
    manager = GraphManager(CPU, sizes, memory_limit=limit)
    manager.capture(kinds or {"step": Hungry()})
    return manager


def test_sizes_over_memory_limit_are_left_out():
    everything = taken(limited(None))
    manager = limited(everything[8] + everything[4])
    assert list(taken(manager)) == [8, 4] and set(manager.left_out) == {1, 2} and manager.complete
    assert "size 2 was left out: its graphs should take" in manager.left_out[2]
    # A smaller size may fit where a larger one does not.
    assert list(taken(limited(everything[8] + everything[8] // 4))) == [8, 2]


def test_every_kind_of_a_size_is_left_out():
    everything = taken(limited(None))
    manager = limited(2 * everything[8] + everything[4], step=Hungry(), step_0=Hungry())
    assert {report.key for report in manager.reports} == {
        GraphKey(kind, size) for kind in ("step", "step_0") for size in (8, 2)
    }


def test_batch_of_left_out_size_uses_next_larger():
    everything = taken(limited(None))
    manager = limited(everything[8] + everything[4])
    assert [manager.padded(n) for n in (1, 2, 3, 5)] == [4, 4, 4, 8]
    with pytest.raises(BatchError, match="size 2 was left out"):
        manager.replay(GraphKey("step", 2), ROOMY)


def test_limit_below_largest_size_is_rejected():
    manager = GraphManager(CPU, [1, 8], memory_limit=10)
    with pytest.raises(CaptureError, match=r"largest size, 8 requests.*limit is 10;"):
        manager.capture({"step": Hungry()})
    assert manager.reports == [] and not manager.complete


def test_interrupted_capture_continues_where_it_stopped():
    work, manager = Work(), GraphManager(CPU, [1, 2, 4])

    def fails_at_2(size):
        if size == 2:
            raise KeyError("interrupted")
        return work(size)

    with pytest.raises(KeyError):
        manager.capture({"step": fails_at_2})
    assert not manager.complete
    for _ in range(2):
        manager.capture({"step": work})
    assert work.sizes == [4, 4, 2, 2, 1, 1] and manager.complete and len(manager.reports) == 3
    work.total.zero_()
    for size in (1, 2, 4):
        manager.replay(GraphKey("step", size), ROOMY)
    assert work.total.tolist() == [7]


def test_capturable_chooses_how_it_is_captured():
    continue_flag, total = torch.zeros(1, dtype=torch.int32), torch.zeros(1)

    def body():
        total.add_(1)
        continue_flag.copy_(total < 3)

    manager = captured(
        sizes=(1,),
        loop=lambda size: Capturable.loop(body, body, ROOMY, continue_flag, 5),
    )
    total.zero_()
    continue_flag.fill_(1)
    manager.replay(GraphKey("loop", 1), ROOMY)
    assert total.tolist() == [3]


def test_joined_work_is_one_graph_with_shorter_bound():
    x = torch.ones(1)
    first = Capturable(lambda: x.add_(1), CaptureConstants(max_reqs=8, max_query_len=1, max_seq_len=32))
    second = Capturable(lambda: x.mul_(3), CaptureConstants(max_reqs=8, max_query_len=5, max_seq_len=64))
    assert second.after(first).constants == CaptureConstants(max_reqs=8, max_query_len=5, max_seq_len=32)
    assert first.after(second).constants == CaptureConstants(max_reqs=8, max_query_len=1, max_seq_len=32)
    graph = second.after(first).capture(EmulatedRuntime())
    graph.replay()
    assert x.tolist() == [6]

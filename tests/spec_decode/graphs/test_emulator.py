import gc
import weakref

import numpy as np
import pytest
import torch

from builders import BatchBuffers, advance_state
from spec_decode.graphs import CaptureError, runtime_for
from tests.factories import CPU, make_tables, state_of


def capture(fn):
    return runtime_for(CPU).capture(fn)


def test_a_capture_does_not_execute():
    x = torch.arange(4.0)
    capture(lambda: x.add_(1).mul_(2))
    assert x.tolist() == [0, 1, 2, 3]


def test_a_replay_executes_once():
    x = torch.arange(4.0)
    graph = capture(lambda: x.add_(1).mul_(2))
    graph.replay()
    assert x.tolist() == [2, 4, 6, 8]


def test_a_replay_reads_what_its_inputs_hold_now():
    x, y = torch.zeros(3), torch.zeros(3)
    graph = capture(lambda: y.copy_(x * 2 + 1))
    for value in (1.0, 5.0):
        x.fill_(value)
        graph.replay()
        assert y.tolist() == [2 * value + 1] * 3


def test_replays_add_up():
    x = torch.zeros(1)
    graph = capture(lambda: x.add_(1))
    for _ in range(3):
        graph.replay()
    assert x.tolist() == [3]


def test_python_values_are_frozen_as_they_were_at_capture():
    x, host = torch.zeros(1), {"n": 1}
    graph = capture(lambda: x.add_(host["n"]))
    host["n"] = 100
    graph.replay()
    assert x.tolist() == [1]


def test_python_branches_are_frozen_as_they_were_at_capture():
    x, host = torch.zeros(1), {"up": True}
    graph = capture(lambda: x.add_(1) if host["up"] else x.sub_(1))
    host["up"] = False
    graph.replay()
    assert x.tolist() == [1]


def test_a_tensor_bound_to_the_name_later_is_not_the_captured_one():
    held = {"x": torch.zeros(1)}
    first = held["x"]
    graph = capture(lambda: held["x"].add_(1))
    held["x"] = torch.zeros(1)
    graph.replay()
    assert held["x"].tolist() == [0] and first.tolist() == [1]


def test_memory_allocated_anew_goes_stale():
    x, held = torch.ones(1), {}
    graph = capture(lambda: held.update(y=x + 1))
    captured = held["y"]
    held["y"] = torch.zeros(1)
    graph.replay()
    assert held["y"].tolist() == [0] and captured.tolist() == [2]


def test_a_result_is_poison_until_a_replay():
    x, held = torch.ones(2), {}
    graph = capture(lambda: held.update(y=x + 1))
    assert held["y"].isnan().all()
    graph.replay()
    assert held["y"].tolist() == [2, 2]


def test_a_result_keeps_its_address_over_replays():
    x, held = torch.ones(2), {}
    graph = capture(lambda: held.update(y=x + 1))
    address = held["y"].data_ptr()
    x.fill_(4)
    graph.replay()
    assert held["y"].data_ptr() == address and held["y"].tolist() == [5, 5]


def test_an_operation_with_several_results_is_replayed_whole():
    x, out = torch.tensor([1.0, 3.0, 2.0]), (torch.zeros(3), torch.zeros(3, dtype=torch.int64))

    def sort():
        for to, result in zip(out, x.sort(), strict=True):
            to.copy_(result)

    graph = capture(sort)
    x.copy_(torch.tensor([9.0, 8.0, 7.0]))
    graph.replay()
    assert out[0].tolist() == [7, 8, 9] and out[1].tolist() == [2, 1, 0]


def test_writes_through_views_reach_their_base_only_at_replay():
    x = torch.zeros(2, 3)
    graph = capture(lambda: x[1, 1:].view(2, 1).fill_(4))
    assert x.count_nonzero() == 0
    graph.replay()
    assert x.tolist() == [[0, 0, 0], [0, 4, 4]]


def test_views_made_before_the_capture_see_the_replay():
    x = torch.zeros(4)
    view = x[2:]
    capture(lambda: x.add_(1)).replay()
    assert view.tolist() == [1, 1]


def test_reads_through_views_are_of_the_memory_as_it_is_at_replay():
    x, y = torch.zeros(2, 3), torch.zeros(3, 2)
    graph = capture(lambda: y.copy_(x.t()))
    x.copy_(torch.arange(6.0).view(2, 3))
    graph.replay()
    assert y.tolist() == [[0, 3], [1, 4], [2, 5]]


def test_a_view_of_a_result_is_read_at_replay():
    x, y = torch.zeros(4), torch.zeros(2)
    graph = capture(lambda: y.copy_((x + 1)[1:3]))
    x.copy_(torch.arange(4.0))
    graph.replay()
    assert y.tolist() == [2, 3]


def test_an_out_argument_is_written_only_at_replay():
    x, y = torch.ones(2), torch.zeros(2)
    graph = capture(lambda: torch.add(x, x, out=y))
    assert y.tolist() == [0, 0]
    graph.replay()
    assert y.tolist() == [2, 2]


def test_indexing_with_device_integers_is_device_work():
    x, index, y = torch.arange(10.0), torch.tensor([1, 2]), torch.zeros(2)
    graph = capture(lambda: y.copy_(x[index]))
    index.copy_(torch.tensor([7, 3]))
    graph.replay()
    assert y.tolist() == [7, 3]


def test_storing_at_device_integers_is_device_work():
    x, index, five = torch.zeros(4), torch.tensor([0]), torch.tensor([5.0])

    def store():
        x[index] = five

    graph = capture(store)
    index.fill_(2)
    graph.replay()
    assert x.tolist() == [0, 0, 5, 0]


def test_a_custom_op_is_recorded_as_one_operation():
    batch = BatchBuffers(make_tables([20, 20]), max_tokens=2)
    batch.load([1, 1], [3, 4])
    before = state_of(batch)
    graph = capture(lambda: advance_state(batch, 2))
    assert state_of(batch) == before and graph.num_nodes == 1
    batch.load([1, 1], [9, 15])
    graph.replay()
    assert batch.seq_lens.tolist() == [10, 16] and batch.step.tolist() == [1]


def test_a_custom_op_that_reads_its_own_tensors_on_the_cpu_is_no_host_read():
    from attn_backends.kernels.paged_attention import paged_attention

    cache, out = torch.ones(2, 4, 1, 64), torch.zeros(1, 1, 64)
    ints = [torch.tensor(v, dtype=torch.int32) for v in ([[0, 1]], [0], [0, 1])]

    def attend():
        tensors = (torch.ones(1, 1, 64), cache, cache, *ints)
        lengths = {"max_query_len": 1, "max_seq_len": 8, "num_splits": 1}
        absent = dict.fromkeys(("sinks", "tree_masks", "sliding_window", "soft_cap"))
        out.copy_(paged_attention(*tensors, **lengths, **absent, scale=1.0, causal=True, batch_invariant=False))

    graph = capture(attend)
    ints[1].fill_(3)
    graph.replay()
    assert out.eq(1).all()


def test_fresh_device_tensors_are_device_work():
    y = torch.zeros(3)
    capture(lambda: y.copy_(torch.arange(3) + torch.ones(3) + torch.full((3,), 2.0))).replay()
    assert y.tolist() == [3, 4, 5]


FLAG, NUMBERS, COUNT = torch.tensor([True, False, True]), torch.arange(3.0), torch.tensor(2)
BYTES, MATRIX, GENERATOR = FLAG.byte(), torch.eye(3), torch.Generator()
HOST_READS = {
    "item": lambda: COUNT.item(),
    "tolist": lambda: NUMBERS.tolist(),
    "numpy": lambda: NUMBERS.numpy(),
    "np.asarray": lambda: np.asarray(NUMBERS),
    "cpu": lambda: NUMBERS.cpu(),
    "bool": lambda: bool(COUNT > 1),
    "if": lambda: 1 if COUNT > 1 else 2,
    "int": lambda: int(COUNT),
    "float": lambda: float(COUNT),
    "range": lambda: range(COUNT),
    "slice by a device value": lambda: NUMBERS[:COUNT],
    "shape by a device value": lambda: torch.zeros(COUNT),
    "equal": lambda: torch.equal(NUMBERS, NUMBERS + 1),
    "allclose": lambda: torch.allclose(NUMBERS, NUMBERS),
    "any in a condition": lambda: 1 if FLAG.any() else 2,
    "in": lambda: 2.0 in NUMBERS,
    "to a named cpu": lambda: NUMBERS.to("cpu:0"),
    "to a named cpu and a dtype": lambda: NUMBERS.to("cpu", torch.float64),
    "to a cpu by keyword": lambda: NUMBERS.to(device="cpu"),
    "made on the cpu": lambda: torch.zeros(3, device="cpu") + NUMBERS,
    "linalg.inv": lambda: torch.linalg.inv(MATRIX),
    "linalg.solve": lambda: torch.linalg.solve(MATRIX, MATRIX),
    "linalg.eigvalsh": lambda: torch.linalg.eigvalsh(MATRIX),
    "linalg.svdvals": lambda: torch.linalg.svdvals(MATRIX),
}
SHAPES_OF_DATA = {
    "nonzero": lambda: FLAG.nonzero(),
    "where with one argument": lambda: torch.where(FLAG),
    "read by a mask": lambda: NUMBERS[FLAG],
    "write by a mask": lambda: NUMBERS.index_put_((FLAG,), torch.zeros(2)),
    "read by a mask of bytes": lambda: NUMBERS[BYTES],
    "write by a mask of bytes": lambda: NUMBERS.index_put_((BYTES,), torch.zeros(2)),
    "masked_select": lambda: NUMBERS.masked_select(FLAG),
    "unique": lambda: NUMBERS.unique(),
    "repeat_interleave by a device value": lambda: NUMBERS.repeat_interleave(torch.ones_like(FLAG, dtype=torch.int64)),
    "bincount": lambda: COUNT[None].bincount(),
}
FRESH_HOST_DATA = {
    "tensor": lambda: torch.tensor([1.0]),
    "as_tensor": lambda: torch.as_tensor([1.0]),
    "from_numpy": lambda: torch.from_numpy(np.ones(2)) + 1,
    "frombuffer": lambda: torch.frombuffer(bytearray(8), dtype=torch.float32) + 1,
    "from_dlpack": lambda: torch.from_dlpack(np.ones(2)) + 1,
}
OTHER_MEMORY = {
    "set_": lambda: NUMBERS.clone().set_(MATRIX),
    "set_ to a storage": lambda: NUMBERS.clone().set_(MATRIX.untyped_storage()),
    "resize_": lambda: NUMBERS.clone().resize_(9),
}
GENERATORS = {
    "rand": lambda: torch.rand(3, generator=GENERATOR),
    "normal_": lambda: NUMBERS.normal_(generator=GENERATOR),
    "randperm": lambda: torch.randperm(3, generator=GENERATOR),
}
REFUSED = {**HOST_READS, **SHAPES_OF_DATA, **FRESH_HOST_DATA, **OTHER_MEMORY, **GENERATORS}


@pytest.mark.parametrize("fn", REFUSED.values(), ids=REFUSED)
def test_what_no_graph_can_hold_is_refused(fn):
    with pytest.raises(CaptureError, match="may only enqueue device work"):
        capture(fn)


@pytest.mark.parametrize("fn", REFUSED.values(), ids=REFUSED)
def test_what_is_refused_in_a_capture_is_fine_outside(fn):
    before = NUMBERS.clone()
    fn()
    NUMBERS.copy_(before)


def test_a_refused_capture_leaves_memory_as_it_was():
    x = torch.zeros(2)
    with pytest.raises(CaptureError):
        capture(lambda: x.add_(1).sum().item())
    assert x.tolist() == [0, 0]


def test_a_function_that_fails_leaves_memory_as_it_was_and_the_next_capture_works():
    x = torch.zeros(2)

    def fail():
        x.add_(1)
        raise KeyError("its own error")

    with pytest.raises(KeyError, match="its own error"):
        capture(fail)
    capture(lambda: x.add_(2)).replay()
    assert x.tolist() == [2, 2]


def test_a_captured_function_records_no_gradients():
    x = torch.ones(2, requires_grad=True)
    held = {}
    capture(lambda: held.update(y=x * 2)).replay()
    assert not held["y"].requires_grad and held["y"].tolist() == [2, 2]


def test_an_intermediate_lives_as_long_as_its_graph():
    x, y, refs = torch.ones(2), torch.zeros(2), []

    def run():
        between = x + 1
        refs.append(weakref.ref(between))
        y.copy_(between)

    graph = capture(run)
    gc.collect()
    x.fill_(5)
    graph.replay()
    assert y.tolist() == [6, 6]


def test_two_graphs_over_the_same_memory_keep_their_own_results():
    x, held = torch.ones(1), {}
    first = capture(lambda: held.update(first=x + 1))
    second = capture(lambda: held.update(second=x + 10))
    first.replay()
    second.replay()
    assert held["first"].tolist() == [2] and held["second"].tolist() == [11]


def test_the_emulator_counts_the_bytes_that_its_captures_keep():
    runtime, x = runtime_for(CPU), torch.zeros(2)
    runtime.capture(lambda: x.add_(1))
    assert runtime.memory_used() == 0
    runtime.capture(lambda: x + 1)
    assert runtime.memory_used() == 2 * x.element_size()


def test_filling_a_slice_with_a_number_is_device_work():
    x = torch.zeros(4)

    def fill():
        x[1:3] = 5.0

    runtime_for(CPU).capture(fill)


@pytest.mark.parametrize("read", [repr, lambda x: x.to("cpu").add(1), lambda x: np.from_dlpack(x)])
def test_other_host_reads_are_refused(read):
    with pytest.raises(CaptureError):
        runtime_for(CPU).capture(lambda: read(torch.ones(2)))


def counting(limit=5):
    """A loop that counts `left` down and keeps continue_flag set while some is left."""
    left, runs, continue_flag = torch.zeros(1), torch.zeros(1), torch.zeros(1, dtype=torch.int32)

    def body():
        left.sub_(1)
        runs.add_(1)
        continue_flag.copy_(left > 0)

    return left, runs, continue_flag, runtime_for(CPU).capture_loop(body, body, continue_flag, limit - 1)


@pytest.mark.parametrize("times", [1, 3, 5])
def test_a_loop_runs_its_body_until_the_body_ends_it(times):
    left, runs, continue_flag, graph = counting()
    left.fill_(times)
    graph.replay()
    assert runs.tolist() == [times] and continue_flag.tolist() == [0]


def test_a_loop_runs_its_body_once_whatever_it_finds():
    left, runs, _, graph = counting()
    graph.replay()
    assert runs.tolist() == [1] and left.tolist() == [-1]


def test_the_capture_of_a_loop_does_not_execute():
    left, runs, continue_flag, _ = counting()
    assert left.tolist() == runs.tolist() == continue_flag.tolist() == [0]


def test_a_loop_that_never_ends_is_stopped_in_words():
    left, runs, _, graph = counting(limit=4)
    left.fill_(5)
    with pytest.raises(CaptureError, match="must end within 3 iterations"):
        graph.replay()
    assert runs.tolist() == [4]


def test_a_loop_refuses_a_host_read_in_its_body():
    with pytest.raises(CaptureError):
        runtime_for(CPU).capture_loop(print, lambda: COUNT.item(), torch.zeros(1, dtype=torch.int32), 3)


def pieces(fn):
    return runtime_for(CPU).capture_pieces(fn)


def test_a_call_between_pieces_sees_what_the_piece_before_it_wrote_and_feeds_the_next():
    x, y, seen = torch.ones(2), torch.zeros(2), []

    def outside(t):
        seen.append(t.tolist())
        return t * 10

    graph = pieces(lambda split_op: y.copy_(split_op(outside, x + 1) + 5))
    seen.clear()
    for value in (3.0, 7.0):
        x.fill_(value)
        graph.replay()
        assert seen.pop() == [value + 1] * 2 and y.tolist() == [(value + 1) * 10 + 5] * 2


def test_python_values_are_frozen_in_the_pieces_and_read_anew_between_them():
    x, host = torch.zeros(1), {"n": 1}
    graph = pieces(lambda split_op: x.copy_(split_op(lambda t: t + host["n"], x) * host["n"]))
    host["n"] = 5
    graph.replay()
    assert x.tolist() == [5]


def test_a_capture_in_pieces_leaves_memory_as_it_was_and_its_results_poisoned():
    x, held = torch.zeros(2), {}

    def run(split_op):
        x.add_(1)
        held["outside"] = split_op(lambda t: t + 1, x)
        held["inside"] = held["outside"] + 1

    graph = pieces(run)
    assert x.tolist() == [0, 0] and held["outside"].isnan().all() and held["inside"].isnan().all()
    graph.replay()
    assert held["outside"].tolist() == [2, 2] and held["inside"].tolist() == [3, 3]


def test_a_host_read_is_refused_in_a_piece_and_allowed_between_them():
    x = torch.ones(2)
    pieces(lambda split_op: split_op(lambda t: t * t.sum().item(), x)).replay()
    for run in (lambda split_op: x.sum().item(), lambda split_op: split_op(torch.neg, x).sum().item()):
        with pytest.raises(CaptureError):
            pieces(run)


def test_a_run_without_a_call_outside_is_one_piece():
    x = torch.zeros(1)
    graph = pieces(lambda split_op: x.add_(1))
    graph.replay()
    assert x.tolist() == [1] and graph.num_nodes == 1


def test_a_release_gives_back_the_bytes_of_graphs():
    runtime, x = runtime_for(CPU), torch.zeros(2)
    runtime.capture(lambda: x + 1)
    runtime.release()
    assert runtime.memory_used() == 0


def test_a_replay_over_an_input_that_was_freed_is_refused_before_it_runs():
    held, y = {"x": torch.ones(2)}, torch.zeros(2)
    graph = capture(lambda: y.add_(1).copy_(held["x"]))
    held.clear()
    with pytest.raises(CaptureError, match="8 bytes that aten::copy_ uses were freed since"):
        graph.replay()
    assert y.tolist() == [0, 0]


def test_a_replay_over_an_input_that_was_moved_is_refused():
    x, y = torch.ones(2), torch.zeros(2)
    graph = capture(lambda: y.copy_(x))
    x.resize_(1 << 12)
    with pytest.raises(CaptureError, match="were moved since"):
        graph.replay()


def test_a_view_keeps_the_input_of_a_graph():
    held, y = {"x": torch.ones(2)}, torch.zeros(2)
    graph = capture(lambda: y.copy_(held["x"]))
    view = held.pop("x")[:1]
    graph.replay()
    assert y.tolist() == [1, 1] and view.tolist() == [1]


def test_a_graph_keeps_no_input_alive():
    held, y = {"x": torch.ones(2)}, torch.zeros(2)
    graph = capture(lambda: y.copy_(held["x"]))
    alive = weakref.ref(held.pop("x"))
    assert alive() is None and graph.num_nodes == 1


def test_memory_that_a_replay_does_not_write_does_not_survive_from_the_last_one():
    """A pool lends the memory of an intermediate to whatever runs next."""
    y = torch.zeros(2)
    graph = capture(lambda: y.copy_(torch.empty(2).nan_to_num_(1.0).add_(1)))
    for _ in range(2):
        graph.replay()
        assert y.tolist() == [2, 2]


def test_the_default_generator_draws_anew_in_each_replay():
    y = torch.zeros(4)
    graph = capture(lambda: y.copy_(torch.rand(4)))
    graph.replay()
    first = y.clone()
    graph.replay()
    assert not torch.equal(first, y)


def test_a_capture_draws_no_random_numbers():
    before = torch.get_rng_state()
    capture(lambda: torch.rand(4))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_tensor_of_host_memory_can_be_made_again_after_a_capture():
    capture(lambda: NUMBERS + 1)
    assert torch.frombuffer(bytearray(b"ab"), dtype=torch.uint8).tolist() == [97, 98]

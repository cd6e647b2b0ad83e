"""The emulator of CUDA graphs: a replay repeats the captured work over the current memory, and nothing else."""

import operator
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from builders import BatchBuffers, advance_state
from spec_decode.graphs import CaptureError, runtime_for
from tests.factories import CPU, make_tables, state_of


def capture(fn):
    return runtime_for(CPU).capture(fn)


WHERE = pytest.mark.parametrize("inference_mode", [True, False], ids=["inference mode", "no inference mode"])


def sort_into(x, index, y):
    for to, result in zip((y, index), x.sort(1), strict=True):
        to.copy_(result)


WORK = {
    "in place": lambda x, index, y: x.add_(1).mul_(2),
    "into other memory": lambda x, index, y: y.copy_(x * 2 + 1),
    "an out argument": lambda x, index, y: torch.add(x, x, out=y),
    "several results of one operation": sort_into,
    "through a view that is read": lambda x, index, y: y.view(3, 2).copy_(x.t()),
    "through a view that is written": lambda x, index, y: y[1, 1:].view(2, 1).fill_(4),
    "a view of a result": lambda x, index, y: y[0, :2].copy_((x + 1)[1, 1:]),
    "a result turned in place": lambda x, index, y: y.copy_((x.t() + 1).t_()),
    "a slice filled with a number": lambda x, index, y: operator.setitem(y, (0, slice(1, 3)), 5.0),
    "read at device integers": lambda x, index, y: y.copy_(x[:, index[1]]),
    "stored at device integers": lambda x, index, y: operator.setitem(y[0], index[1], x[1]),
    "filled with a number": lambda x, index, y: y.copy_(x.masked_fill(x > 2, 1.0).index_fill(1, index[0, :1], 2.0)),
    "fresh device tensors": lambda x, index, y: y.copy_(torch.arange(3) + torch.ones(3) + torch.full((3,), 2.0)),
    "an operation made of others": lambda x, index, y: y.copy_(torch.nn.functional.rms_norm(x, (3,))),
}
"""Of x and y, fp32 [2, 3], and index, int64 [2, 3]."""


@pytest.mark.outside_inference_mode
@WHERE
@pytest.mark.parametrize("work", WORK.values(), ids=WORK)
def test_capture_does_no_work_and_replay_repeats_it(work, inference_mode):
    memory = torch.ones(2, 3), torch.ones(2, 3, dtype=torch.int64), torch.zeros(2, 3)
    views, before = [tensor[1:] for tensor in memory], [tensor.clone() for tensor in memory]
    with torch.inference_mode(inference_mode):
        graph = capture(lambda: work(*memory))
    assert all(map(torch.equal, memory, before))
    assert graph.num_nodes == capture(lambda: work(*memory)).num_nodes
    for start in (1, 7):
        memory[0].copy_((torch.arange(6.0).view(2, 3) + start) % 5)
        memory[1].copy_(torch.tensor([2, 0, 1]).roll(start))
        expected = [tensor.clone() for tensor in memory]
        work(*expected)
        graph.replay()
        assert all(map(torch.equal, memory, expected))
        assert all(torch.equal(view, tensor[1:]) for view, tensor in zip(views, memory, strict=True))


def test_python_values_are_frozen_at_capture():
    x, host = torch.zeros(1), {"n": 1, "up": True}
    graph = capture(lambda: x.add_(host["n"]) if host["up"] else x.sub_(1))
    host.update(n=100, up=False)
    graph.replay()
    assert x.tolist() == [1]


def test_rebound_name_does_not_change_captured_memory():
    tensors = {"x": torch.zeros(1)}
    graph = capture(lambda: tensors.update(y=tensors["x"].add_(1) + 1))
    captured = dict(tensors)
    tensors.update(x=torch.zeros(1), y=torch.zeros(1))
    graph.replay()
    assert [tensors[name].item() for name in "xy"] == [0, 0] and [captured[name].item() for name in "xy"] == [1, 2]


def test_result_is_poison_until_replay_and_keeps_address():
    x, results = torch.ones(2), {}
    graph = capture(lambda: results.update(y=x + 1))
    assert results["y"].isnan().all()
    address = results["y"].data_ptr()
    for value in (1, 4):
        x.fill_(value)
        graph.replay()
        assert results["y"].data_ptr() == address and results["y"].tolist() == [value + 1] * 2


def test_custom_op_is_recorded_as_one_operation():
    batch = BatchBuffers(make_tables([20, 20]), max_tokens=2)
    batch.load([1, 1], [3, 4])
    before = state_of(batch)
    graph = capture(lambda: advance_state(batch, 2))
    assert state_of(batch) == before and graph.num_nodes == 1
    batch.load([1, 1], [9, 15])
    graph.replay()
    assert batch.seq_lens.tolist() == [10, 16] and batch.step.tolist() == [1]


def test_op_with_kernel_and_decomposition_is_one_node():
    assert capture(lambda: torch.ops.aten.silu_backward(NUMBERS, NUMBERS)).num_nodes == 1


def test_custom_op_reading_cpu_tensors_is_allowed():
    from attn_backends.kernels.paged_attention import paged_attention

    cache, out = torch.ones(2, 4, 1, 64), torch.zeros(1, 1, 64)
    ints = [torch.tensor(v, dtype=torch.int32) for v in ([[0, 1]], [0], [0, 1])]

    def attend():
        tensors = (torch.ones(1, 1, 64), cache, cache, *ints)
        lengths = {"max_query_len": 1, "max_seq_len": 8, "num_splits": 1}
        absent = dict.fromkeys(("sinks", "tree_masks", "sliding_window", "soft_cap", "key_scale", "value_scale"))
        out.copy_(paged_attention(*tensors, **lengths, **absent, scale=1.0, causal=True, batch_invariant=False))

    graph = capture(attend)
    ints[1].fill_(3)
    graph.replay()
    assert out.eq(1).all()


FLAG, NUMBERS, COUNT = torch.tensor([True, False, True]), torch.arange(3.0), torch.tensor(2)
BYTES, MATRIX, GENERATOR = FLAG.byte(), torch.eye(3), torch.Generator()
HOST_READS = {
    "item": lambda: COUNT.item(),
    "tolist": lambda: NUMBERS.tolist(),
    "numpy": lambda: NUMBERS.numpy(),
    "np.asarray": lambda: np.asarray(NUMBERS),
    "np.from_dlpack": lambda: np.from_dlpack(NUMBERS),
    "repr": lambda: repr(NUMBERS),
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
    "multinomial": lambda: MATRIX.multinomial(1),
    "a draw from a categorical": lambda: torch.distributions.Categorical(MATRIX, validate_args=False).sample(),
    "normal of device deviations": lambda: torch.normal(0.0, NUMBERS),
    "masked_fill by a device value": lambda: NUMBERS.masked_fill(FLAG, NUMBERS[1]),
    "masked_fill_ by a device value": lambda: NUMBERS.masked_fill_(FLAG, NUMBERS[1]),
    "index_fill by a device value": lambda: NUMBERS.index_fill(0, COUNT[None], NUMBERS[1]),
    "linspace to a device value": lambda: torch.linspace(0.0, NUMBERS[2], 3),
    "embedding of a bounded norm": lambda: torch.embedding_renorm_(MATRIX.clone(), COUNT[None], 1.0, 2.0),
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


@WHERE
@pytest.mark.parametrize("fn", REFUSED.values(), ids=REFUSED)
def test_uncapturable_work_is_rejected_only_in_capture(fn, inference_mode):
    with torch.inference_mode(inference_mode):
        with pytest.raises(CaptureError, match="can only enqueue device work"):
            capture(fn)
        before = NUMBERS.clone()
        fn()
        NUMBERS.copy_(before)


@pytest.mark.parametrize(("fail", "error"), [(torch.Tensor.item, CaptureError), ({}.pop, KeyError)])
def test_failed_capture_restores_memory(fail, error):
    x = torch.zeros(2)
    with pytest.raises(error):
        capture(lambda: fail(x.add_(1).sum()))
    assert x.tolist() == [0, 0]
    capture(lambda: x.add_(2)).replay()
    assert x.tolist() == [2, 2]


@pytest.mark.outside_inference_mode
def test_a_captured_function_records_no_gradients():
    x = torch.ones(2, requires_grad=True)
    results = {}
    capture(lambda: results.update(y=x * 2)).replay()
    assert not results["y"].requires_grad and results["y"].tolist() == [2, 2]


@pytest.mark.outside_inference_mode
def test_a_captured_function_may_enter_inference_mode():
    y = torch.zeros(2)
    capture(torch.inference_mode()(lambda: y.copy_(y + 1))).replay()
    assert y.tolist() == [1, 1]


def test_graphs_over_same_memory_keep_own_results():
    x, results = torch.ones(1), {}
    first = capture(lambda: results.update(first=x + 1))
    second = capture(lambda: results.update(second=x + 10))
    first.replay()
    second.replay()
    assert results["first"].tolist() == [2] and results["second"].tolist() == [11]


def test_memory_used_counts_captures_until_release():
    runtime, x = runtime_for(CPU), torch.zeros(2)
    runtime.capture(lambda: x.add_(1))
    assert runtime.memory_used() == 0
    runtime.capture(lambda: x + 1)
    assert runtime.memory_used() == 2 * x.element_size()
    runtime.release()
    assert runtime.memory_used() == 0


def counting(limit=5):
    """A loop that counts `left` down and keeps continue_flag set while some is left."""
    left, runs, continue_flag = torch.zeros(1), torch.zeros(1), torch.zeros(1, dtype=torch.int32)

    def body():
        left.sub_(1)
        runs.add_(1)
        continue_flag.copy_(left > 0)

    return left, runs, continue_flag, runtime_for(CPU).capture_loop(body, body, continue_flag, limit - 1)


@pytest.mark.parametrize("times", [0, 1, 3, 5])
def test_loop_runs_body_once_and_until_it_ends(times):
    left, runs, continue_flag, graph = counting()
    assert left.tolist() == runs.tolist() == continue_flag.tolist() == [0]
    left.fill_(times)
    graph.replay()
    assert runs.tolist() == [max(1, times)] and continue_flag.tolist() == [0]


def test_endless_loop_raises_after_limit():
    left, runs, _, graph = counting(limit=4)
    left.fill_(5)
    with pytest.raises(CaptureError, match="must end within 3 iterations"):
        graph.replay()
    assert runs.tolist() == [4]


def test_loop_rejects_host_read_in_body():
    with pytest.raises(CaptureError):
        runtime_for(CPU).capture_loop(print, lambda: COUNT.item(), torch.zeros(1, dtype=torch.int32), 3)


def pieces(fn):
    return runtime_for(CPU).capture_pieces(fn)


def test_split_op_reads_previous_piece_and_feeds_next():
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


@pytest.mark.outside_inference_mode
def test_inference_mode_pieces_replay_outside_it():
    x = torch.ones(2)
    with torch.inference_mode():
        graph = pieces(lambda split_op: x.add_(split_op(torch.neg, x + 2)))
    graph.replay()
    assert x.tolist() == [-2, -2]


def test_rows_without_a_result_are_undefined():
    x, rows = torch.ones(3), [3]
    y = torch.zeros(3)
    graph = pieces(lambda split_op: y.copy_(split_op(lambda t: t[: rows[0]], x)))
    for rows[0] in (3, 1):
        graph.replay()
    assert y[:1].tolist() == [1] and y[1:].isnan().all()


def test_a_graph_with_a_call_that_holds_split_op_is_no_cycle():
    x, held = torch.ones(1), []

    def run(split_op):
        def call(t):
            return t + 1 if split_op else t

        held.append(weakref.ref(call))
        split_op(call, x)

    graph = pieces(run)
    graph.replay()
    del graph
    assert held[0]() is None


def test_python_values_are_frozen_only_inside_pieces():
    x, host = torch.zeros(1), {"n": 1}
    graph = pieces(lambda split_op: x.copy_(split_op(lambda t: t + host["n"], x) * host["n"]))
    host["n"] = 5
    graph.replay()
    assert x.tolist() == [5]


def test_piecewise_capture_restores_memory_and_poisons_results():
    x, results = torch.zeros(2), {}

    def run(split_op):
        x.add_(1)
        results["outside"] = split_op(lambda t: t + 1, x)
        results["inside"] = results["outside"] + 1

    graph = pieces(run)
    assert x.tolist() == [0, 0] and results["outside"].isnan().all() and results["inside"].isnan().all()
    graph.replay()
    assert results["outside"].tolist() == [2, 2] and results["inside"].tolist() == [3, 3]


def test_host_read_is_allowed_only_between_pieces():
    x = torch.ones(2)
    pieces(lambda split_op: split_op(lambda t: t * t.sum().item(), x)).replay()
    for run in (lambda split_op: x.sum().item(), lambda split_op: split_op(torch.neg, x).sum().item()):
        with pytest.raises(CaptureError):
            pieces(run)


def test_run_without_split_op_is_one_piece():
    x = torch.zeros(1)
    graph = pieces(lambda split_op: x.add_(1))
    graph.replay()
    assert x.tolist() == [1] and graph.num_nodes == 1


@pytest.mark.parametrize(
    ("read", "user"),
    [(lambda split_op, x: x, "aten::copy_"), (lambda split_op, x: split_op(torch.clone, x), "a split operation")],
    ids=["in a graph", "between pieces"],
)
def test_replay_over_freed_input_is_rejected(read, user):
    inputs, y = {"x": torch.ones(2)}, torch.zeros(2)
    graph = pieces(lambda split_op: y.copy_(read(split_op, inputs["x"])))
    inputs.clear()
    with pytest.raises(CaptureError, match=f"8 bytes that {user} uses were freed since"):
        graph.replay()
    assert y.tolist() == [0, 0]


def test_replay_over_moved_input_is_rejected():
    x, y = torch.ones(2), torch.zeros(2)
    graph = capture(lambda: y.copy_(x))
    x.resize_(1 << 12)
    with pytest.raises(CaptureError, match="were moved since"):
        graph.replay()


def test_view_keeps_graph_input_alive():
    inputs, y = {"x": torch.ones(2)}, torch.zeros(2)
    graph = capture(lambda: y.copy_(inputs["x"]))
    view = inputs.pop("x")[:1]
    graph.replay()
    assert y.tolist() == [1, 1] and view.tolist() == [1]


def test_a_graph_keeps_no_input_alive():
    inputs, y = {"x": torch.ones(2)}, torch.zeros(2)
    graph = capture(lambda: y.copy_(inputs["x"]))
    alive = weakref.ref(inputs.pop("x"))
    assert alive() is None and graph.num_nodes == 1


def test_unwritten_memory_does_not_survive_replays():
    """A pool lends the memory of an intermediate to whatever runs next."""
    y = torch.zeros(2)
    graph = capture(lambda: y.copy_(torch.empty(2).nan_to_num_(1.0).add_(1)))
    for _ in range(2):
        graph.replay()
        assert y.tolist() == [2, 2]


def test_default_generator_draws_anew_in_each_replay():
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


def test_frombuffer_works_after_a_capture():
    capture(lambda: NUMBERS + 1)
    assert torch.frombuffer(bytearray(b"ab"), dtype=torch.uint8).tolist() == [97, 98]


def test_capture_does_not_affect_other_threads():
    with ThreadPoolExecutor(1) as other:
        tensors = []
        capture(lambda: tensors.append(other.submit(torch.frombuffer, bytearray(b"ab"), dtype=torch.uint8).result()))
    assert tensors[0].tolist() == [97, 98]


def test_threads_capture_side_by_side():
    def work(_):
        x = torch.zeros(2)
        for _ in range(50):
            capture(lambda: [x.add_(1) for _ in range(10)]).replay()
        return x.tolist()

    before = torch.frombuffer, torch.get_rng_state()
    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(work, range(2))) == [[500, 500]] * 2
    assert torch.frombuffer is before[0] and torch.equal(torch.get_rng_state(), before[1])

"""CUDA graph semantics on the CPU, so that graph-unsafe code fails in a test without a GPU.

Capture runs the function once under a recorder. It keeps every device operation with the exact tensors it touched,
rejects what a CUDA graph rejects (host reads, data-dependent shapes, fresh host data, generators of the caller), then
restores all written memory, because a capture does not execute. Replay runs the recorded operations on the same
storages with their current content; every Python value stays as it was at capture. Memory allocated by the capture is
poisoned, so reading a result before a replay is noticed. Memory that existed before is held only by its address: a
replay raises once it has been freed.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import cache
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

from spec_decode.graphs.dispatch_mode import PlainDispatchMode
from spec_decode.graphs.runtime import ONE_CAPTURE, CaptureError, Graph, PiecewiseGraph, SplitOp, SplitOpCall

_CONVERSIONS = ("bool", "int", "float", "index", "array", "dlpack", "repr")
HOST_READS = {getattr(torch.Tensor, name) for name in ("tolist", "numpy", "cpu", "item")}
HOST_READS |= {getattr(torch.Tensor, f"__{name}__") for name in _CONVERSIONS}
"""Methods that read a tensor from the host; on a CPU they dispatch no operation that would show it."""
_FRESH_HOST_DATA = {"aten::lift_fresh", "aten::lift_fresh_copy", "aten::lift"}
_MOVES_STORAGE = {"aten::resize_", "aten::resize_as_", "aten::set_"}
_HOST_BUFFERS = ("frombuffer", "from_dlpack")
"""Functions of torch that make a tensor from host memory and that no mode intercepts."""
_CHECKS_ON_THE_HOST = {"aten::_linalg_check_errors", "aten::_linalg_eigh", "aten::_linalg_svd", "aten::linalg_eig"}
_CHECKS_ON_THE_HOST |= {"aten::_linalg_eigvals", "aten::linalg_lstsq"}
_READS_WITHIN = {f"aten::{name}": "" for name in ("multinomial", "embedding_renorm_")}
_READS_WITHIN |= {f"aten::{name}": "Tensor" for name in ("masked_fill", "masked_fill_", "linspace", "logspace")}
_READS_WITHIN |= {f"aten::{name}": "_Tensor" for name in ("index_fill", "index_fill_", "normal")}
"""Operations that internally read one of their inputs from the host, on a device too, invisible to any mode; restricted
to overloads whose name contains this part."""
_EMPTY = {"aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty", "aten::new_empty_strided"}
_LISTS = (list, tuple)
_BOOL_INDEXED = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}


class _Node(NamedTuple):
    """One device operation; `fresh` are the outputs that do not alias an input, at their captured addresses."""

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    fresh: list[tuple[int, torch.Tensor]]
    is_empty: bool
    """See `_Traits`."""

    def run(self) -> None:
        if self.is_empty:
            # The pool may have lent the memory to another operation since the last replay.
            for _, captured in self.fresh:
                _poison(captured)
            return
        result = self.op(*self.args, **self.kwargs)
        if self.fresh:
            made = tensors_of(result)
            for index, captured in self.fresh:
                if made[index].shape != captured.shape:
                    raise CaptureError(f"{self.op} returned {made[index].shape}, but {captured.shape} was captured")
                captured.copy_(made[index])


class _ExternalMemory:
    """Memory that a graph uses but does not own, held by its address as on a device.

    user: the operation that uses it first.
    """

    def __init__(self, storage: torch.UntypedStorage, user: str) -> None:
        self._user, self._address, self._bytes = user, storage.data_ptr(), storage.nbytes()
        self._owner = StorageWeakRef(storage)
        memory = (ctypes.c_byte * self._bytes).from_address(self._address)
        self._alias = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()

    def view(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor, which lies in this storage, without keeping its memory alive."""
        alias = torch.empty(0, dtype=tensor.dtype)
        return alias.set_(self._alias, tensor.storage_offset(), tensor.size(), tensor.stride())

    def require_alive(self) -> None:
        """Raise CaptureError unless the memory is where it was."""
        owner = torch.UntypedStorage._new_with_weak_ptr(self._owner.cdata)
        if owner is None or (owner.data_ptr(), owner.nbytes()) != (self._address, self._bytes):
            raise CaptureError(
                f"a replay uses the addresses of its capture, but {self._bytes} bytes that {self._user} uses were "
                f"{'freed' if owner is None else 'moved'} since; a device would access whatever lies there now. "
                "Keep each tensor that a captured function uses alive as long as its graph."
            )


class EmulatedGraph:
    """A recorded run."""

    def __init__(self, nodes: list[_Node], borrowed: Iterable[_ExternalMemory]) -> None:
        self._nodes, self._borrowed = nodes, tuple(borrowed)
        self.num_nodes: int | None = len(nodes)

    def replay(self) -> None:
        """As Graph.replay. Raises CaptureError, with nothing run, if memory that it uses was freed."""
        for memory in self._borrowed:
            memory.require_alive()
        with torch.inference_mode():  # a device writes any memory, torch a tensor of this mode only here
            for node in self._nodes:
                node.run()


class _EmulatedCall(SplitOpCall):
    """An eager call that keeps no memory that the capture did not allocate, and leaves poison where it is undefined."""

    def __init__(
        self,
        fn: Callable[..., torch.Tensor],
        inputs: list[torch.Tensor],
        result: torch.Tensor,
        borrowed: Iterable[_ExternalMemory],
    ) -> None:
        super().__init__(fn, inputs, result)
        self._borrowed = tuple(borrowed)

    def replay(self) -> None:
        """As Graph.replay. Raises CaptureError, with nothing run, if memory that it reads was freed."""
        for memory in self._borrowed:
            memory.require_alive()
        with torch.inference_mode():
            _poison(self._result)
        super().replay()


class EmulatedLoop:
    """A recorded run, followed by another that repeats while a device scalar is set."""

    def __init__(self, first: Graph, body: Graph, continue_flag: torch.Tensor, limit: int) -> None:
        self._first, self._body, self._continue_flag, self._limit = first, body, continue_flag, limit
        self.num_nodes = body.num_nodes

    def replay(self) -> None:
        """As Graph.replay. Raises CaptureError for a loop that exceeds its limit."""
        self._first.replay()
        for _ in range(self._limit):
            if not int(self._continue_flag):
                return
            self._body.replay()
        if int(self._continue_flag):
            raise CaptureError(
                f"a captured loop must end within {self._limit} iterations, but its body has not set the continue flag "
                "to 0. A device would loop forever, so it was stopped here. Fix the body."
            )


class EmulatedRuntime:
    """Records and replays on CPU tensors."""

    def __init__(self) -> None:
        self._allocated = 0

    def capture(self, fn: Callable[[], Any]) -> Graph:
        (graph,) = self._record(lambda split_op: fn())
        return graph

    def capture_loop(
        self, first: Callable[[], Any], body: Callable[[], Any], continue_flag: torch.Tensor, limit: int
    ) -> EmulatedLoop:
        return EmulatedLoop(self.capture(first), self.capture(body), continue_flag, limit)

    def capture_pieces(self, run: Callable[[SplitOp], Any]) -> PiecewiseGraph:
        return PiecewiseGraph(self._record(run))

    def memory_used(self) -> int:
        return self._allocated

    def release(self) -> None:
        self._allocated = 0

    def _record(self, run: Callable[[SplitOp], Any]) -> list[Graph]:
        parts: list[Graph] = []
        recorder = _Recorder()

        def begin() -> None:
            for name in _HOST_BUFFERS:
                piece.enter_context(mock.patch.object(torch, name, _raising(getattr(torch, name))))
            piece.enter_context(HostReadGuard())
            piece.enter_context(recorder)

        def split_op(fn: Callable[..., torch.Tensor], /, *inputs: torch.Tensor) -> torch.Tensor:
            piece.close()
            result = fn(*inputs).clone()
            borrowed: dict[int, _ExternalMemory] = {}
            unowned = [recorder.unowned(each, borrowed, "a split operation") for each in inputs]
            parts.extend((recorder.take(), _EmulatedCall(fn, unowned, result, borrowed.values())))
            recorder.adopt(result)
            begin()
            return result

        with ONE_CAPTURE:
            try:
                with torch.no_grad(), torch.random.fork_rng(devices=[]), ExitStack() as piece:
                    begin()
                    run(split_op)
            finally:
                recorder.restore()
        self._allocated += recorder.bytes_allocated()
        graphs = [*parts, recorder.take()]
        parts.clear()  # as CudaRuntime
        return graphs


class HostReadGuard(TorchFunctionMode):
    """Rejects the Python-level reads that no dispatched operation shows."""

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in HOST_READS:
            raise _capture_error(f"Tensor.{func.__name__}", "reads device data on the host")
        if kwargs or func is torch.Tensor.to:
            named = (
                (*args[1:], *(kwargs or {}).values()) if func is torch.Tensor.to else ((kwargs or {}).get("device"),)
            )
            if any(isinstance(value, str) and value.startswith("cpu") for value in named):
                raise _capture_error(f"{func.__name__} to 'cpu'", "copies the data to the host")
        if func is torch.Tensor.__setitem__ and isinstance(args[2], int | float) and _is_basic(args[1]):
            # On a device this fills a view; the CPU implementation would wrap the number in a fresh host tensor.
            return args[0][args[1]].fill_(args[2])
        return func(*args, **(kwargs or {}))


def _is_basic(index: Any) -> bool:
    parts = index if isinstance(index, tuple) else (index,)
    return all(part is None or part is ... or type(part) in (int, slice) for part in parts)


class _Recorder(PlainDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self._nodes: list[_Node] = []
        self._made: dict[int, torch.Tensor] = {}
        self._before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def dispatch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        traits = _traits(func)
        _check_capturable(func, traits, args, kwargs)
        if traits.changes_view:
            # Host-only, and done once captured: what was recorded saw the tensor as it is now.
            self._keep_view(args[0])
            return func(*args, **kwargs)
        inputs = {_storage(tensor) for tensor in tensors_of((*args, *kwargs.values()))}
        for place, name in traits.written:
            for tensor in tensors_of(args[place] if place < len(args) else kwargs.get(name)):
                key = _storage(tensor)
                if key not in self._made and key not in self._before:
                    storage = tensor.untyped_storage()
                    self._before[key] = (storage, storage.clone())
        result = func(*args, **kwargs)
        fresh = []
        for index, tensor in enumerate(tensors_of(result)):
            if (key := _storage(tensor)) not in inputs:
                fresh.append((index, tensor))
                self._made[key] = tensor
        # An output that only aliases its input is a view: the view object is already what replay needs.
        if fresh or traits.written:
            self._nodes.append(_Node(func, args, kwargs, fresh, traits.is_empty))
        return result

    def _keep_view(self, tensor: torch.Tensor) -> None:
        view = tensor.detach()

        def kept(each: torch.Tensor) -> torch.Tensor:
            return view if each is tensor else each

        for place, node in enumerate(self._nodes):
            self._nodes[place] = node._replace(
                args=tuple([_with_tensors(value, kept) for value in node.args]),
                kwargs={name: _with_tensors(value, kept) for name, value in node.kwargs.items()},
                fresh=[(index, kept(each)) for index, each in node.fresh],
            )

    def take(self) -> EmulatedGraph:
        """Return a graph of the operations recorded since the last call."""
        borrowed: dict[int, _ExternalMemory] = {}

        def unowned(tensor: torch.Tensor) -> torch.Tensor:
            return self.unowned(tensor, borrowed, node.op._schema.name)

        taken, self._nodes = self._nodes, []
        nodes = []
        for node in taken:
            args = tuple([_with_tensors(value, unowned) for value in node.args])
            kwargs = {name: _with_tensors(value, unowned) for name, value in node.kwargs.items()}
            nodes.append(node._replace(args=args, kwargs=kwargs))
        return EmulatedGraph(nodes, borrowed.values())

    def unowned(self, tensor: torch.Tensor, borrowed: dict[int, _ExternalMemory], user: str) -> torch.Tensor:
        """Return the tensor; if the capture did not allocate it, one that does not keep its memory. Adds that memory,
        by storage, to `borrowed`."""
        if (key := _storage(tensor)) in self._made:
            return tensor
        if key not in borrowed:
            storage = tensor.untyped_storage()
            if not storage.nbytes():
                return tensor
            borrowed[key] = _ExternalMemory(storage, user)
        return borrowed[key].view(tensor)

    def adopt(self, tensor: torch.Tensor) -> None:
        """Treat a tensor made outside as one that the capture allocated."""
        self._made[_storage(tensor)] = tensor

    def bytes_allocated(self) -> int:
        """Bytes of the captured operations' results, which a graph keeps."""
        return sum(tensor.untyped_storage().nbytes() for tensor in self._made.values())

    @torch.inference_mode()  # as a replay
    def restore(self) -> None:
        """Undo every write to memory that existed before, and poison what the capture allocated."""
        for storage, content in self._before.values():
            storage.copy_(content)
        for tensor in self._made.values():
            _poison(tensor)


def _poison(tensor: torch.Tensor) -> None:
    if tensor.is_floating_point():
        tensor.fill_(float("nan"))


def _storage(tensor: torch.Tensor) -> int:
    address: int = tensor.untyped_storage()._cdata
    return address


class _Traits(NamedTuple):
    """Properties that an operation's schema and tags fix for every call, cached because reading them costs as much as a
    small operation."""

    name: str
    written: tuple[tuple[int, str], ...]
    """Index and name of each argument that is written to."""
    is_empty: bool
    """Whether it allocates without filling."""
    changes_view: bool
    """Whether it only gives a tensor other sizes or strides over its memory."""
    indexes: bool
    """Whether its second argument can be a mask."""
    draws: bool
    """Whether one of its arguments can be a generator."""
    host_read: str
    """See `host_read`."""
    refused: str
    """Why no call of it can be captured; else empty."""


@cache
def _traits(op: Any) -> _Traits:
    schema, tags, refused = op._schema, op.tags, ""
    written = tuple(
        (place, argument.name)
        for place, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
    read = ""
    within = _READS_WITHIN.get(schema.name)
    reads_within = within is not None and within in schema.overload_name
    if torch.Tag.data_dependent_output in tags or schema.name in _CHECKS_ON_THE_HOST or reads_within:
        read = "reads device data on the host"
    elif torch.Tag.dynamic_output_shape in tags:
        read = "makes a shape that depends on device data"
    if schema.name in _MOVES_STORAGE:
        refused = "moves a tensor to other memory"
    elif schema.name in _FRESH_HOST_DATA:
        refused = "copies fresh host data to the device"
    return _Traits(
        name=schema.name,
        written=written,
        is_empty=schema.name in _EMPTY,
        changes_view=torch.Tag.inplace_view in tags,
        indexes=schema.name in _BOOL_INDEXED,
        draws=any("Generator" in str(argument.type) for argument in schema.arguments),
        host_read=read,
        refused=refused,
    )


def tensors_of(value: Any) -> list[torch.Tensor]:
    """Collect the tensors in an operation's arguments or result: the value itself, or its list items, at any depth."""
    if isinstance(value, torch.Tensor):
        return [value]
    found: list[torch.Tensor] = []
    if isinstance(value, _LISTS):
        for each in value:
            if isinstance(each, torch.Tensor):
                found.append(each)
            elif isinstance(each, _LISTS):
                found += tensors_of(each)
    return found


def _with_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return the value with each of its tensors changed."""
    if isinstance(value, torch.Tensor):
        return change(value)
    return type(value)([_with_tensors(each, change) for each in value]) if isinstance(value, _LISTS) else value


def _check_capturable(func: Any, traits: _Traits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if why := host_read(func, args) or traits.refused:
        raise _capture_error(traits.name, why)
    if traits.draws and any(isinstance(value, torch.Generator) for value in (*args, *kwargs.values())):
        raise _capture_error(traits.name, "draws from a generator whose state the graph does not advance")


def host_read(func: Any, args: tuple[Any, ...]) -> str:
    """Return why a dispatched operation waits for the device; empty if it does not."""
    traits = _traits(func)
    if traits.indexes:
        masked = any(t is not None and t.dtype in (torch.bool, torch.uint8) for t in args[1])
        return "indexes by a mask, whose count only the device knows" if masked else ""
    return traits.host_read


def _raising(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Wrap the function so that the recording thread cannot call it."""
    recording = threading.get_ident()

    def refuse(*args: Any, **kwargs: Any) -> torch.Tensor:
        if threading.get_ident() == recording:
            raise _capture_error(f"torch.{make.__name__}", "reads host memory")
        return make(*args, **kwargs)

    return refuse


def _capture_error(name: str, why: str) -> CaptureError:
    return CaptureError(
        f"a captured function can only enqueue device work of fixed shape, but {name} {why}; a graph would freeze the "
        "value. Compute it on the device, or move it before the capture."
    )

"""Backends by name: built-in ones, those registered with `@register`, and those that other packages declare."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any, NamedTuple, TypeAlias, TypeVar, overload
from urllib.parse import quote

import torch

from attn_backends.base import AttentionBackend
from attn_backends.capabilities import Accepted, Capabilities, Rejected, is_version
from attn_backends.extras import install_hint
from attn_backends.state import StateBackend
from attn_backends.state_capabilities import StateCapabilities
from attn_backends.torch_settings import torch_settings_kept
from builders import CONTRACT_VERSION, AttentionSpec, MetadataBuilder, StateBuilder, StateSpec
from builders.errors import did_you_mean

ENTRY_POINT_GROUP = "attn_backends"

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_NAME_RULE = "ASCII letters, digits, _, . and -, beginning with a letter or a digit"
"""What a report's file name, a terminal and a table can all show."""
_RESERVED_NAMES = ("all", "available")

Backend: TypeAlias = AttentionBackend | StateBackend
Factory = Callable[[], Backend]
B = TypeVar("B", bound=Backend)


class BackendError(LookupError):
    """A backend is not available; the message says why and what to do."""


class UnknownBackend(BackendError):
    """No backend has that name."""


class DuplicateBackend(BackendError):
    """The name is taken."""


class BrokenBackend(BackendError):
    """The backend is registered but does not load."""


class MissingPackage(BrokenBackend):
    """A package that the backend imports is not installed. missing: the package, and how to install it."""

    def __init__(self, name: str, missing: str) -> None:
        super().__init__(f"backend {name!r} cannot be loaded: {missing}")
        self.missing = missing


class _Registration(NamedTuple):
    factory: Factory | str
    extra: str | None = None
    state: bool = False
    """Whether it is a StateBackend."""


_BUILT_IN = {
    "torch_reference": _Registration("attn_backends.torch_reference:TorchReference"),
    "triton_paged": _Registration("attn_backends.triton_paged:TritonPaged"),
    "triton_mla": _Registration("attn_backends.triton_mla:TritonMla"),
    "sparse_swa_mla": _Registration("attn_backends.sparse_swa_mla:SparseSwaMla"),
    "flash_attn3": _Registration("attn_backends.flash_attn3:FlashAttn3"),
    "flash_attn3_mla": _Registration("attn_backends.flash_attn3_mla:FlashAttn3Mla"),
    "flashinfer": _Registration("attn_backends.flashinfer:FlashInfer", "flashinfer"),
    "flashinfer_tensor_cores": _Registration("attn_backends.flashinfer:FlashInferTensorCores", "flashinfer"),
    "flashinfer_cuda_cores": _Registration("attn_backends.flashinfer:FlashInferCudaCores", "flashinfer"),
    "flashinfer_xqa": _Registration("attn_backends.flashinfer:FlashInferXqa", "flashinfer"),
    "flashmla": _Registration("attn_backends.flashmla:FlashMla", "vllm"),
    "flashmla_sparse": _Registration("attn_backends.flashmla_sparse:FlashMlaSparse", "vllm"),
    "triton_state": _Registration("attn_backends.triton_state:TritonState", state=True),
    "torch_state": _Registration("attn_backends.torch_state:TorchState", state=True),
}
_registered = dict(_BUILT_IN)
_loaded: dict[str, Backend] = {}
_started_cuda: list[Backend] = []
_refused: dict[str, str] = {}


class PlugIn(NamedTuple):
    """A backend that another package declares: its name for `get`, and its package."""

    name: str
    package: str


@overload
def register(backend: type[B], /) -> type[B]: ...
@overload
def register(*, replace: bool = False) -> Callable[[type[B]], type[B]]: ...
def register(backend: type[B] | None = None, /, *, replace: bool = False) -> Any:
    """Register the decorated backend class under its `name`, as ``@register`` or ``@register(replace=True)``.

    The first `get` makes the instance, without arguments. replace: override a name that is already registered.

    Raises BackendError for anything but a subclass of AttentionBackend or StateBackend and for an invalid name, and
    DuplicateBackend for a name that is taken or differs from another only in case. Nothing is registered then.
    """
    if backend is None:
        return lambda decorated: _register(decorated, replace)
    return _register(backend, replace)


def _register(backend: type[B], replace: bool) -> type[B]:
    if not (isinstance(backend, type) and issubclass(backend, Backend)):
        raise BackendError(
            f"@register must decorate a subclass of AttentionBackend or StateBackend, got {backend!r}. State the name "
            "in the class."
        )
    name: str = getattr(backend, "name", "")
    if problem := name_problem(name):
        raise BackendError(f"{problem}, the name of {backend.__qualname__}. Choose another name.")
    for known in (*names(), *state_names()):
        if name != known and name.casefold() == known.casefold():
            raise DuplicateBackend(
                f"backend names must differ by more than case, {name!r} and {known!r} do not. Choose another name."
            )
        if name == known and not replace:
            raise DuplicateBackend(
                f"backend {name!r} is already registered; pass replace=True to override it, or choose another name"
            )
    _registered[name] = _Registration(backend, state=issubclass(backend, StateBackend))
    _loaded.pop(name, None)
    return backend


def unregister(name: str) -> None:
    """Remove a backend that `register` added, and restore the built-in one of that name."""
    if name in _BUILT_IN:
        _registered[name] = _BUILT_IN[name]
    else:
        _registered.pop(name, None)
    _loaded.pop(name, None)


def names() -> list[str]:
    """Return the name of every attention backend: built-in ones, those registered in this process, then those that
    packages declare, of which any can turn out to be a StateBackend once it is loaded.

    A package cannot override a built-in name: its backend is listed as "package:name" and does not load. If several
    packages declare a name, or names that differ only in case, each backend is listed as "package:name" and loads by
    that name. An invalid name is listed as "package:name" with the name percent-encoded, and does not load.
    """
    known = [name for name, registration in _registered.items() if not registration.state]
    return [*known, *(name for name in _declared() if name not in _registered)]


def state_names() -> list[str]:
    """Return the name of every backend of recurrent state: built-in ones, then those registered in this process."""
    return [name for name, registration in _registered.items() if registration.state]


def get(name: str) -> AttentionBackend:
    """Return the attention backend of that name, imported on first use.

    Raises UnknownBackend (lists the names) or BrokenBackend (why it does not load, and the extra that would help).
    """
    backend = load(name)
    if isinstance(backend, AttentionBackend):
        return backend
    raise UnknownBackend(
        f"attention needs one of {', '.join(sorted(names()))}, got {name!r}, which keeps recurrent state. Name one of "
        "these, or pass a StateSpec."
    )


def get_state(name: str) -> StateBackend:
    """Return the backend of recurrent state of that name. Raises UnknownBackend or BrokenBackend, as `get`."""
    backend = load(name)
    if isinstance(backend, StateBackend):
        return backend
    raise UnknownBackend(
        f"recurrent state needs one of {', '.join(sorted(state_names()))}, got {name!r}, which computes attention. "
        "Name one of these, or pass an AttentionSpec."
    )


def load(name: str) -> Backend:
    """Return the backend of that name, of either kind. Raises as `get`."""
    if name not in _loaded:
        registration = _registered.get(name) or _from_entry_point(name)
        cuda_before = torch.cuda.is_initialized()
        with torch_settings_kept(f"loading backend {name!r}"):
            _loaded[name] = _checked(name, _make(name, registration))
        if torch.cuda.is_initialized() and not cuda_before:
            _started_cuda.append(_loaded[name])
    return _loaded[name]


def plug_ins() -> list[PlugIn]:
    """Return the backends that other packages declare, by their names for `get`."""
    return [PlugIn(name, _package(points[0])) for name, points in _declared().items() if len(points) == 1]


def name_problem(name: object) -> str:
    """Return what is wrong with a name; empty if it is valid."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        return f"a backend name must be made of {_NAME_RULE}, got {name!r:.80}"
    if name in _RESERVED_NAMES:
        return f"a backend name must be free, {name!r} means several backends on the command line"
    return ""


def is_loaded(name: str) -> bool:
    """Return whether `get` has already loaded the backend."""
    return name in _loaded


def registered_here(name: str) -> bool:
    """Return whether the name was registered by a call, so that another process does not have it."""
    return name in _registered and _registered[name] is not _BUILT_IN.get(name)


def refuse(name: str, why: str) -> None:
    """Block the backends that packages declare under this name: `get` raises BrokenBackend with the reason instead."""
    _refused[name] = why


def started_cuda(backend: Backend) -> bool:
    """Return whether loading this backend initialised CUDA, which takes memory and the user's choice of device."""
    return any(loaded is backend for loaded in _started_cuda)


def explain(name: str, spec: AttentionSpec | StateSpec, device: torch.device) -> Accepted | Rejected:
    """Return whether the named backend serves the spec on the device; Rejected with the reason if it does not load."""
    try:
        backend: Any = load(name)
    except BrokenBackend as error:
        return Rejected((str(error),))
    if isinstance(backend, StateBackend) is not isinstance(spec, StateSpec):
        return Rejected((f"takes {'a StateSpec' if isinstance(backend, StateBackend) else 'an AttentionSpec'}",))
    try:
        answer = backend.supports(spec, device)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a plug-in can raise anything; the others must still answer
        return Rejected((f"backend {name!r} failed in supports(): {type(error).__name__}: {error}",))
    if isinstance(answer, Accepted | Rejected):
        return answer
    return Rejected((f"backend {name!r} must return Accepted or Rejected from supports(), got {answer!r}",))


def _declared() -> dict[str, list[EntryPoint]]:
    """Return the entry points that packages declare, by their names for `get`. A name with several is ambiguous."""
    by_folded_name: dict[str, list[EntryPoint]] = {}
    for point in entry_points(group=ENTRY_POINT_GROUP):
        by_folded_name.setdefault(point.name.casefold(), []).append(point)
    found: dict[str, list[EntryPoint]] = {}
    for folded, points in by_folded_name.items():
        named = [point for point in points if not name_problem(point.name)]
        if folded not in _BUILT_IN:
            found |= dict.fromkeys((point.name for point in named), named)
        if folded in _BUILT_IN or len(named) > 1:
            found |= {_full_name(point): [point] for point in named}
        found |= {_full_name(point): [point] for point in points if point not in named}
    return found


def _package(point: EntryPoint) -> str:
    return point.dist.name if point.dist else "unknown"


def _full_name(point: EntryPoint) -> str:
    return quote(f"{_package(point)}:{point.name}", safe=":")


def _from_entry_point(name: str) -> _Registration:
    if name in _refused:
        raise BrokenBackend(_refused[name])
    points = _declared().get(name)
    if points is None:
        known = [*names(), *state_names()]
        raise UnknownBackend(
            f"a backend must be one of {', '.join(sorted(known))}, got {name!r:.80}. Fix the name, or install the "
            f"package that registers it.{did_you_mean(name, known)}"
        )
    if len(points) > 1:
        packages, declared = map(_package, points), dict.fromkeys(repr(point.name) for point in points)
        raise BrokenBackend(
            f"a backend name must be free, packages {' and '.join(packages)} all declare {' and '.join(declared)}; the "
            f"name is ambiguous, so none was loaded. Use {' or '.join(map(_full_name, points))}, or uninstall all but "
            "one."
        )
    (point,) = points
    if problem := name_problem(point.name):
        raise BrokenBackend(f"{problem} from package {_package(point)}. Rename its entry point.")
    if point.name.casefold() in _BUILT_IN:
        raise BrokenBackend(
            f"a backend name must be free, package {_package(point)} declares {point.name!r}, which is built in; its "
            "backend was not loaded, and the name means the built-in one. Rename its entry point."
        )
    return _Registration(lambda: point.load()())


def _make(name: str, registration: _Registration) -> Backend:
    try:
        factory = registration.factory
        if isinstance(factory, str):
            module, _, attribute = factory.partition(":")
            factory = getattr(import_module(module), attribute)
        return factory()
    except ImportError as error:
        remedy = f": {install_hint(registration.extra)}" if registration.extra else ""
        absent = isinstance(error, ModuleNotFoundError) and error.name is not None and "." not in error.name
        raise MissingPackage(name, f"{f'{error.name} is not installed' if absent else error}{remedy}") from error
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a plug-in can raise anything; its message becomes the reason
        raise BrokenBackend(
            f"backend {name!r} is registered but does not load: {type(error).__name__}: {error}."
        ) from error


def _checked(name: str, backend: object) -> Backend:
    if not isinstance(backend, Backend):
        raise BrokenBackend(
            f"backend {name!r} must be an attn_backends.AttentionBackend or StateBackend, its factory returned a "
            f"{type(backend).__name__}; it was not used. Return an instance of a subclass."
        )
    if problems := "; ".join(_contract_problems(backend)):
        raise BrokenBackend(
            f"backend {name!r} must state {problems}; what it serves is unknown, so it was not used. Edit the class."
        )
    declared = [] if isinstance(backend, StateBackend) else sorted(backend.capabilities.fused_writes)
    if missing := [write.method for write in declared if not callable(_stated(backend, write.method))]:
        raise BrokenBackend(
            f"backend {name!r} must have the methods of the fused writes in its capabilities, it lacks "
            f"{' and '.join(missing)}; a layer would fail in mid-step, so it was not used. Inherit FusedRopeWrite or "
            "FusedLatentWrite, or remove the write from fused_writes."
        )
    if backend.contract_version[0] != CONTRACT_VERSION[0]:
        raise BrokenBackend(
            f"backend {name!r} was built for contract {backend.contract_version}, this is {CONTRACT_VERSION}; its "
            "metadata would be misread, so it was not used. Install matching versions."
        )
    return backend


def _contract_problems(backend: Backend) -> Iterator[str]:
    """Yield what a backend fails to state about its capabilities, builder and contract."""
    state = isinstance(backend, StateBackend)
    able, made_by = (StateCapabilities, StateBuilder) if state else (Capabilities, MetadataBuilder)
    record, builder, version = (_stated(backend, name) for name in ("capabilities", "builder", "contract_version"))
    if not isinstance(record, able):
        yield f"capabilities, a {able.__name__} record, got {record!r}"
    if not (isinstance(builder, type) and issubclass(builder, made_by)):
        yield f"builder, a subclass of {made_by.__name__}, got {builder!r}"
    if not is_version(version):
        yield f"contract_version, two counts such as {CONTRACT_VERSION}, got {version!r}"


def _stated(backend: Backend, attribute: str) -> object:
    try:
        return getattr(backend, attribute, None)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a plug-in's property can raise anything; the error is shown as the value
        return error

"""Options and arguments shared by several verbs: devices, and backend names, including plug-ins. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import MISSING, Field, fields
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_args, get_origin, get_type_hints

import click

from spec_decode.cli.output import UserError, did_you_mean, printable, progress, stdout

if TYPE_CHECKING:
    import torch

    from attn_backends import Capabilities, StateCapabilities

R = TypeVar("R")

device_option = click.option(
    "--device", metavar="DEVICE", help="cpu, cuda or cuda:N; default: cuda if there is one, else cpu."
)
"""For `resolve_device`."""
PAGE_SIZE = click.IntRange(1, 2**16)


def options_as(record: type[R]) -> Callable[[Callable[[R], None]], Callable[..., None]]:
    """Return a decorator that passes a command its options as one record, a dataclass whose fields declare them.

    A field is annotated with its help, plus flags or a click type where its name and type are not enough; or with a
    click decorator.
    """
    kinds = get_type_hints(record, include_extras=True)

    def decorate(command: Callable[[R], None]) -> Callable[..., None]:
        decorated = wraps(command)(lambda **values: command(record(**values)))
        for each in reversed(fields(record)):  # type: ignore[arg-type]
            decorated = _parameter(each, *get_args(kinds[each.name]))(decorated)
        return decorated

    return decorate


def _parameter(field: Field[Any], kind: Any, *declared: Any) -> Callable[..., Any]:
    first: Callable[..., Any] = declared[0]
    if callable(first) and not isinstance(first, click.ParamType):
        return first
    flags = [text for text in declared if isinstance(text, str) and text.startswith("-")]
    several = get_origin(kind) is tuple
    types = [each for each in declared if isinstance(each, click.ParamType)] or [(get_args(kind) or (kind,))[0]]
    return click.option(
        *(flags or ["--" + field.name.replace("_", "-")]),
        field.name,
        type=click.Path(path_type=Path) if types[0] is Path else types[0],
        default=None if field.default is MISSING else field.default,
        is_flag=kind is bool,
        multiple=several,
        help=declared[-1],
    )


def resolve_device(name: str | None, *, present: bool = True) -> torch.device:
    """Return the device of that name. Raises UserError for an invalid name, and with present for a device that this
    machine lacks.

    Must stay free of imports from `builders` and `attn_backends`: see `interpreter.interpret_kernels_on`.
    """
    import torch

    try:
        device = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if name is None else name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda") or (device.type == "cpu" and device.index):
        raise UserError(f"a device must be cpu, cuda or cuda:N, got {name!r}. Fix --device.")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if present and device.type == "cuda" and (device.index or 0) >= count:
        raise UserError(
            f"--device is {device}, but this machine has {count} CUDA devices. Use another; everything runs on cpu."
        )
    return device


def use_threads(count: int) -> None:
    """Set torch's thread count here and in child processes. More threads rarely help checks: their tensors are small,
    and on a busy machine threads wait for one another."""
    import torch

    os.environ["OMP_NUM_THREADS"] = str(count)
    torch.set_num_threads(count)


def chosen_names(requested: Sequence[str], device: torch.device) -> list[str]:
    """Return distinct backend names, at least one; `all` and `available` stand for several.

    Raises UnknownBackend for an unknown name, and UserError if none is available.
    """
    from attn_backends import UnknownBackend, registry

    known = [*registry.names(), *registry.state_names()]
    chosen: dict[str, None] = {}
    for name in requested:
        if name == "available":
            chosen |= dict.fromkeys([*available_names(device), *available_names(device, registry.state_names())])
        else:
            chosen |= dict.fromkeys(known if name == "all" else [name])
    for name in chosen:
        if name not in known:
            raise UnknownBackend(
                f"a backend must be one of {', '.join(known)}, or all, or available, got {name!r}. "
                f"Fix the name, or install the package that registers it.{_hint(name, known)}"
            )
    if requested and not chosen:
        raise UserError(f"no backend is available on {device}. attn-backends list --device {device} says why.")
    return list(chosen)


def _hint(name: str, known: Sequence[str]) -> str:
    """Return what may have been meant: our names in vLLM are those of backends, with a prefix or a suffix."""
    own = name.removeprefix("ATTN_BACKENDS_").removesuffix("_IN_GRAPH")
    if own != name and own.lower() in known:
        return f" {name} is a name in vLLM: its kernels are those of {own.lower()}."
    return did_you_mean(name, known)


def available_names(device: torch.device, names: Sequence[str] | None = None) -> list[str]:
    """Return the backends that load and are made for the device, independent of the specs they serve.

    names: those to try; None tries every attention backend.
    """
    from attn_backends import BrokenBackend, registry

    try_plug_ins_aloud()
    found = []
    for name in registry.names() if names is None else names:
        try:
            if _made_for(registry.load(name).capabilities, device):
                found.append(name)
        except BrokenBackend:
            continue
    return found


def try_plug_ins_aloud() -> dict[str, str]:
    """Run `try_plug_ins` and show what is being loaded; without plug-ins print nothing."""
    from attn_backends import registry
    from spec_decode.tools.plug_ins import try_plug_ins

    if not registry.plug_ins():
        return {}
    with progress(stdout(), each=True) as update:
        return try_plug_ins(
            on_loading=lambda plug_in: update(printable(f"loading backend {plug_in.name} of package {plug_in.package}"))
        )


def _made_for(able: Capabilities | StateCapabilities, device: torch.device) -> bool:
    import torch

    if device.type not in able.devices:
        return False
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= able.compute_capability

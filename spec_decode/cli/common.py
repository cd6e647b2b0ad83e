"""What the verbs share: devices, backend names, printing, and errors a user can cause. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeVar

import click
from rich.console import Console
from rich.text import Text

if TYPE_CHECKING:
    import torch

    from attn_backends import Capabilities

F = TypeVar("F", bound=Callable[..., Any])

_UNKNOWN_WIDTH = 160
"""Columns to lay tables out for where the output is no terminal."""


class UserError(click.ClickException):
    """Something the user can put right: one line on stderr, exit status 2."""

    exit_code = 2

    def show(self, file: IO[Any] | None = None) -> None:
        click.echo(f"error: {' '.join(self.message.split())}", file=file, err=file is None)


def expected_errors() -> tuple[type[Exception], ...]:
    """The exceptions of the three floors that user input can cause."""
    from attn_backends import BackendError
    from builders import BatchError, SpecError
    from spec_decode.conformance.report import ReportError
    from spec_decode.drafter.plan import StrategyError
    from spec_decode.models import CheckpointError

    return BackendError, BatchError, SpecError, CheckpointError, ReportError, StrategyError


def device_option(command: F) -> F:
    """--device, for `resolve_device`."""
    words = "cpu, cuda or cuda:N; without it cuda where there is one, else cpu."
    return click.option("--device", metavar="DEVICE", help=words)(command)


def resolve_device(name: str | None, *, present: bool = True) -> torch.device:
    """The device of that name. present: refuse one that this machine has not.

    Must stay free of imports from `builders` and `attn_backends`: see `interpret_kernels_on`.
    """
    import torch

    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"a device must be cpu, cuda or cuda:N, got {name!r}; nothing was run. Fix --device.")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if present and device.type == "cuda" and (device.index or 0) >= count:
        raise UserError(
            f"device {device} was asked for, this machine has {count} CUDA devices; nothing was run. Use "
            "another --device; everything runs on cpu."
        )
    return device


def interpret_kernels_on(device: torch.device) -> None:
    """On the CPU, have Triton interpret its kernels: they are checked then, not their torch implementation.

    Triton reads the variable when a kernel is defined: call this before anything imports Triton.
    """
    if device.type == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"


def chosen_names(asked: Sequence[str], device: torch.device) -> list[str]:
    """Backend names, each once; `all` and `available` stand for several. UnknownBackend for a stranger."""
    from attn_backends import UnknownBackend, registry

    chosen: dict[str, None] = {}
    for word in asked:
        if word == "available":
            chosen |= dict.fromkeys(available_names(device))
        else:
            chosen |= dict.fromkeys(registry.names() if word == "all" else [word])
    known = registry.names()
    for name in chosen:
        if name not in known:
            raise UnknownBackend(
                f"a backend must be one of {', '.join(known)}, or all, or available, got {name!r}; nothing "
                "was run. Fix the name, or install the package that registers it."
            )
    return list(chosen)


def available_names(device: torch.device) -> list[str]:
    """The backends that load and are made for the device, whichever specs they serve."""
    from attn_backends import BrokenBackend, registry
    from spec_decode.tools.plug_ins import try_plug_ins

    try_plug_ins()
    found = []
    for name in registry.names():
        try:
            if _made_for(registry.get(name).capabilities, device):
                found.append(name)
        except BrokenBackend:
            continue
    return found


def _made_for(able: Capabilities, device: torch.device) -> bool:
    import torch

    if device.type not in able.devices:
        return False
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= able.compute_capability


def stdout() -> Console:
    """Standard output; as wide as the terminal, or wide enough for the tables where it is none."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=_UNKNOWN_WIDTH)


def say(console: Console, text: str, style: str = "") -> None:
    """Print text as it stands: no markup in it is read, and no line of it is broken."""
    console.print(Text(text, style=style), soft_wrap=True)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Make the file's folder; a failure to write becomes a UserError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise UserError(
            f"{path} must be writable, it is not: {error.strerror}; it was not written. Name another path."
        ) from error


def write(target: str, content: str) -> None:
    """Write to a path, or to standard output for `-`."""
    if target == "-":
        click.echo(content, nl=False)
    else:
        with writing(Path(target)):
            Path(target).write_text(content, encoding="utf-8")

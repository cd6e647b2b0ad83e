"""torch's process-wide settings: importing a backend must not change them for everybody else."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch


class _Setting(NamedTuple):
    name: str
    get: Callable[[], Any]
    set: Callable[[Any], object]


def _set_default_device(device: torch.device) -> None:
    # Without a default, torch uses the CPU; setting one slows down every call.
    torch.set_default_device(None if device.type == "cpu" else device)
    try:
        torch.get_default_device()
    except AttributeError:  # torch 2.9 cannot read the default after a reset
        torch.set_default_device(device)


_SETTINGS = (
    # The default device first: the other settings' tensors are made on it.
    _Setting("default device", torch.get_default_device, _set_default_device),
    _Setting("default dtype", torch.get_default_dtype, torch.set_default_dtype),
    _Setting("grad mode", torch.is_grad_enabled, torch.set_grad_enabled),
    _Setting("number of threads", torch.get_num_threads, torch.set_num_threads),
)


@contextmanager
def one_thread() -> Iterator[None]:
    """Limit torch to one thread inside, and restore the previous number on leaving.

    For small tensors: several threads wait for one another at the end of each operation, for long on a busy machine.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def torch_settings_kept(who: str) -> Iterator[None]:
    """Restore, on leaving, torch's default device and dtype, grad mode, number of threads and random generators.

    Warns about what `who` changed, except the generators: drawing a number is only bad manners.
    """
    settings = [setting.get() for setting in _SETTINGS]
    states = torch.get_rng_state(), torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    try:
        yield
    finally:
        for setting, before in zip(_SETTINGS, settings, strict=True):
            if (after := setting.get()) != before:
                setting.set(before)
                warnings.warn(
                    f"{who} set torch's {setting.name} to {after} for the whole process; it is {before} again. Set it "
                    "only where needed, and restore it.",
                    RuntimeWarning,
                    stacklevel=4,
                )
        torch.set_rng_state(states[0])
        torch.cuda.set_rng_state_all(states[1])

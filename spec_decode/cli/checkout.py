"""What stands beside the packages in a checkout and is in no wheel."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from types import ModuleType

from spec_decode.cli.output import UserError

_ROOT = Path(__file__).parents[2]


def from_checkout(module: str, *, what: str, folder: str) -> ModuleType:
    """A module that no wheel brings. Raises UserError where there is no checkout, with `what` and its `folder`."""
    file = _ROOT.joinpath(*module.split("."))
    if not (file.with_suffix(".py").is_file() or (file / "__init__.py").is_file()):
        raise UserError(
            f"{what} are not in the wheel, they are in {folder}/ of the repository. Clone it, run `pip install -e .` "
            "there, and try again."
        )
    return import_module(module)

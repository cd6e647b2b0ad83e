"""Modules that are in a checkout but not in the wheel, such as the kits over engines' own builders."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Protocol, cast

from spec_decode.cli.output import UserError, did_you_mean

if TYPE_CHECKING:
    from spec_decode.testing.subject import Subject

_ROOT = Path(__file__).parents[2]
ENGINES = ("vllm", "sglang")
"""Engines whose metadata builders `check --engine` checks. Their kits are loaded by name, and only then."""


def from_checkout(module: str, *, what: str, folder: str) -> ModuleType:
    """Import a module that no wheel contains. Raises UserError, with `what` and its `folder`, without a checkout."""
    file = _ROOT.joinpath(*module.split("."))
    if not (file.with_suffix(".py").is_file() or (file / "__init__.py").is_file()):
        raise UserError(
            f"{what} are not in the wheel, only in {folder}/ of the repository. Clone it, run `pip install -e .` "
            "there, and try again."
        )
    return import_module(module)


class EngineKit(Protocol):
    """The interface of a module engine_kits.ENGINE."""

    NAMES: Sequence[str]

    def require_engine(self) -> str: ...

    def subjects(self, names: Sequence[str]) -> list[Subject]: ...


def kit_of(engine: str) -> EngineKit:
    """Return the kit over an engine's builders. Raises UserError for an engine without one, and outside a checkout."""
    if engine not in ENGINES:
        raise UserError(
            f"there is no kit for engine {engine!r}. Use --engine {' or --engine '.join(ENGINES)}."
            f"{did_you_mean(engine, ENGINES)}"
        )
    kit = from_checkout(
        f"engine_kits.{engine}",
        what=f"the checks of {engine}'s own builders",
        folder=f"engine_kits/{engine}",
    )
    return cast(EngineKit, kit)


def builder_names(engine: str, requested: Sequence[str]) -> list[str]:
    """Return the requested builders without duplicates; all of the engine's if none is requested.

    Raises UserError for an unknown builder, and BackendError if the engine is missing or has another version.
    """
    kit = kit_of(engine)
    known = kit.NAMES
    for name in requested:
        if name not in known:
            raise UserError(
                f"a builder of {engine} must be one of {', '.join(known)}, got {name!r}. Fix the name."
                f"{did_you_mean(name, known)}"
            )
    kit.require_engine()
    return list(dict.fromkeys(requested or known))

"""`attn-backends new`: a package with your own backend, from the documented example."""

from __future__ import annotations

import re
import shutil
import sys
from contextlib import suppress
from importlib.machinery import PathFinder
from importlib.metadata import PackageNotFoundError, requires
from keyword import iskeyword
from pathlib import Path

import click

from spec_decode.cli.output import UserError

_FOLDERS = (Path(__file__).parent / "example", Path(__file__).parents[2] / "examples" / "window_pages")
"""The example's folder in the wheel and in a checkout."""
_PROJECT = {"attn_backends", "attn_backends_pairs", "benchmarks", "builders", "engine_kits", "spec_decode", "tests"}


@click.command("new")
@click.argument("name")
def new(name: str) -> None:
    """Write a package with a backend called NAME into a new folder.

    The package is the example of the documentation, which passes its checks: replace its builder and its attention.
    """
    from attn_backends import registry

    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise UserError(
            f"a backend's name must be lower-case letters, digits and _, as for a module, got {name!r}. Choose another."
        )
    if problem := registry.name_problem(name):
        raise UserError(f"{problem}. Choose another name.")
    if iskeyword(name):
        raise UserError(f"a backend's name becomes a module's, but {name!r} is a Python keyword. Choose another.")
    if name in registry.names():
        raise UserError(f"a backend's name must be free, but {name!r} is already registered. Choose another.")
    if _hides_a_module(name):
        raise UserError(
            f"a backend's name becomes a module's, but a module {name!r} would hide one of Python or of a package. "
            "Choose another."
        )
    folder = Path(name)
    example = next(folder for folder in _FOLDERS if folder.is_dir())
    texts = {path.relative_to(example): path.read_text("utf-8") for path in _files(example)}
    try:
        folder.mkdir()
    except OSError as error:
        raise UserError(
            f"cannot create the folder {folder}: {error.strerror}. Run this elsewhere, or choose another name."
        ) from error
    paths = {folder / _renamed(relative.as_posix(), name): _renamed(text, name) for relative, text in texts.items()}
    try:
        for path, text in paths.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    except BaseException:
        shutil.rmtree(folder)  # a partial package would block a later run
        raise
    for path in paths:
        click.echo(path)
    click.echo(f"next: pip install -e ./{name} && attn-backends check {name} --family builder")


def _hides_a_module(name: str) -> bool:
    """Whether Python, an installed package, or an optional dependency of this project has a module of this name."""
    needed: set[str] = set()
    with suppress(PackageNotFoundError):  # a checkout that is not installed
        needed = {re.split(r"[^\w-]", package)[0].replace("-", "_") for package in requires("attn-backends") or ()}
    if name in _PROJECT | needed | sys.stdlib_module_names:
        return True
    # The current folder does not count as a package: an existing folder there is a different error.
    places = [place for place in sys.path if place and Path(place).resolve() != Path.cwd()]
    found = PathFinder.find_spec(name, places)
    return found is not None and found.origin is not None


def _files(example: Path) -> list[Path]:
    found = (path for path in sorted(example.rglob("*")) if path.is_file())
    return [path for path in found if path.suffix in (".py", ".toml", ".md", ".yml") and "build" not in path.parts]


def _renamed(text: str, name: str) -> str:
    """Replace the example's name in the text, in each of its three forms."""
    words = name.strip("_").split("_")
    forms = {"window_pages": name, "window-pages": "-".join(words), "WindowPages": "".join(map(str.title, words))}
    for old, new_form in forms.items():
        text = text.replace(old, new_form)
    return text

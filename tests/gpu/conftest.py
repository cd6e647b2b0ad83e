"""GPU evidence: python -m pytest -m gpu tests/gpu/test_memcheck.py --json FILE runs a test and writes a report.

In each file, one test is marked gpu and makes the evidence; the others show on a CPU that it fails where it must.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from attn_backends import BackendError, registry
from scripts import script_report


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--json", type=Path, metavar="FILE", help="report of the one test marked gpu that is run")


def pytest_itemcollected(item: pytest.Item) -> None:
    """Count what shows that evidence can fail as slow: it makes evidence in full, of small models."""
    if not item.get_closest_marker("gpu"):
        item.add_marker("slow")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        end = pytest.fail if item.config.getoption("--json", None) else pytest.skip
        end("needs a CUDA device, torch finds none. Run it on a machine with one.")


@pytest.fixture
def backends(request: pytest.FixtureRequest) -> list[str]:
    """The backends that --attn-backend names, by default all that load here."""
    option = request.config.getoption("--attn-backend")
    if option not in ("available", "all"):
        return [name.strip() for name in option.split(",")]
    found = registry.names()
    for name in list(found) if option == "available" else ():
        try:
            registry.get(name)
        except BackendError as error:
            request.node.warn(pytest.PytestWarning(f"{name} is left out: {error}"))
            found.remove(name)
    return found


@pytest.fixture
def write_report(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Return a function that writes the report to --json, if given. It takes schema and content, and the backends and
    modules (roots) under test in addition to the test itself. A test can call it again as rows arrive: an interrupted
    run leaves the last report."""
    path, config = request.config.getoption("--json", None), request.config
    if path and request.session.testscollected != 1:
        pytest.fail(
            f"--json takes the report of one test, {request.session.testscollected} were collected. Name one file, and "
            "-m gpu before it."
        )

    def write(schema: str, *, roots: Sequence[str] = (), backends: Sequence[str] = (), **content: Any) -> None:
        if path:
            command = ("-m", "pytest", *map(str, config.invocation_params.args))
            roots = (f"tests.gpu.{request.path.stem}", *roots)
            where = {"command": command, "backends": backends}
            script_report.write_report(path, schema, torch.device("cuda"), roots, **where, **content)

    return write

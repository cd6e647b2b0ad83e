"""A pytest plugin, opted into with ``-p spec_decode.testing.pytest_plugin``: one switch for every backend test.

--attn-backend NAME[,NAME...]|available|all   backends of the fixture `attn_backend` (default: available)
"""

from __future__ import annotations

from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("attention backends")
    group.addoption(
        "--attn-backend",
        default="available",
        help="backends to test: names, 'available' (skip those that cannot run here) or 'all' (fail them)",
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "attn_backend" in metafunc.fixturenames:
        chosen = metafunc.config.getoption("--attn-backend")
        metafunc.parametrize("attn_backend", _params(chosen), indirect=True)


def _params(chosen: str) -> list[Any]:
    from attn_backends import names

    wanted = names() if chosen in ("available", "all") else [name.strip() for name in chosen.split(",")]
    return [pytest.param((name, chosen == "available"), id=name) for name in wanted]


@pytest.fixture
def attn_backend(request: pytest.FixtureRequest) -> Any:
    """The backend under test. If it cannot be loaded, a named backend fails; under 'available' it is skipped."""
    from attn_backends import BackendError, get

    name, may_skip = request.param
    try:
        return get(name)
    except BackendError as error:
        if may_skip:
            pytest.skip(str(error))
        pytest.fail(str(error))

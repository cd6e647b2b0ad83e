"""The wheel by itself, without the checkout: it brings all that its commands read."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from spec_decode.cli import new
from tests.examples.stranger import Stranger

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]


def test_the_wheel_brings_the_example_to_where_new_looks_for_it() -> None:
    """What builds the wheel is slow, and so is what tries it; this much of it is always held."""
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    in_wheel, in_checkout = (folder.relative_to(ROOT).as_posix() for folder in new._FOLDERS)

    assert wheel["force-include"] == {in_checkout: in_wheel} and (ROOT / in_checkout).is_dir()
    assert in_wheel.split("/")[0] in wheel["packages"]


@pytest.mark.slow
def test_from_an_empty_folder_the_wheel_makes_a_backend_that_passes_its_checks(tmp_path: Path) -> None:
    pytest.importorskip("hatchling", reason="needs what builds the wheel: pip install hatchling")
    environment, empty = Stranger.arrive(tmp_path / "environment"), tmp_path / "empty"
    empty.mkdir()
    environment.must(f"python -m hatchling build -t wheel -d {tmp_path}", ROOT)
    environment.must(f"pip install --no-deps {tmp_path}/*.whl", empty)
    where = environment.must("python -c 'import spec_decode; print(spec_decode.__file__)'", empty)
    assert Path(where.strip()).is_relative_to(environment.folder)

    assert "mine/mine/builder.py" in environment.must("attn-backends new mine", empty)
    environment.must("pip install --no-deps -e ./mine", empty)
    assert "mine 0.1.0: accepted" in environment.must("attn-backends list", empty)
    assert "mine" in environment.must("attn-backends doctor", empty)
    checked = environment.must("attn-backends check mine --family contract --family builder --device cpu", empty)
    assert "0 not_run" in checked

"""The wheel without the checkout: it contains everything that its commands read."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest

from attn_backends import registry
from attn_backends.fa3_providers import PROVIDERS
from spec_decode.cli import new
from tests.examples.stranger import Stranger

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]


def test_wheel_includes_example_for_new_command() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    in_wheel, in_checkout = (folder.relative_to(ROOT).as_posix() for folder in new._FOLDERS)

    assert settings["force-include"] == {in_checkout: in_wheel} and (ROOT / in_checkout).is_dir()
    assert in_wheel.split("/")[0] in settings["packages"]


def build_wheel(source: Path, folder: Path) -> Path:
    pytest.importorskip("hatchling", reason="needs what builds the wheel: pip install hatchling")
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder], cwd=source, check=True)
    (found,) = folder.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(ROOT, tmp_path_factory.mktemp("wheel"))


@pytest.mark.slow
def test_wheel_has_only_packages_for_users(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {
        "builders", "attn_backends", "spec_decode",
    }  # fmt: skip
    assert wheel.stat().st_size < 1_000_000


def test_installation_page_gives_size_of_every_extra() -> None:
    page = (ROOT / "docs" / "installation.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([\w-]+)` \|.*\| [\d.]+ [MG]B \|", page, re.MULTILINE)
    assert {*rows} == extras() - {"test", "docs"}


def test_refusals_name_existing_extras() -> None:
    named = {registration.extra for registration in registry._BUILT_IN.values() if registration.extra}
    named |= {extra for kind in PROVIDERS for extra in re.findall(r"'\.\[([\w-]+)\]'", kind.remedy)}
    assert {"flash-attn", "flashinfer", "vllm"} <= named <= extras()


def extras() -> set[str]:
    return {*tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]}


@pytest.mark.slow
def test_wheel_works_with_only_its_requirements(wheel: Path, tmp_path: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    required = message_from_bytes(archive.read(metadata)).get_all("Requires-Dist") or []
    environment, empty = Stranger.arrive(tmp_path / "environment", [*required, "pip"]), tmp_path / "empty"
    empty.mkdir()
    # Else it would find more than it requires, and this test nothing.
    environment.must("python -c 'import pytest'", empty, status=1)

    environment.must(f"pip install {wheel}", empty)
    listed = environment.must("attn-backends list --device cpu", empty)
    assert "torch_reference" in listed and "pip install '.[flashinfer]' in a checkout of attn-backends" in listed
    draft = "attn-backends draft 'A list is' --device cpu --max-tokens 4"
    assert "pip install ./attn_backends_pairs in a checkout" in environment.must(draft, empty, status=2)
    environment.must(f"pip install {build_wheel(ROOT / 'attn_backends_pairs', tmp_path / 'pairs')}", empty)
    assert "A list is" in environment.must(draft, empty)


@pytest.mark.slow
def test_wheel_creates_backend_that_passes_its_checks(wheel: Path, tmp_path: Path) -> None:
    environment, empty = Stranger.arrive(tmp_path / "environment"), tmp_path / "empty"
    empty.mkdir()
    environment.must(f"pip install --no-deps {wheel}", empty)
    where = environment.must("python -c 'import spec_decode; print(spec_decode.__file__)'", empty)
    assert Path(where.strip()).is_relative_to(environment.folder)

    assert "mine/mine/builder.py" in environment.must("attn-backends new mine", empty)
    environment.must("pip install --no-deps -e ./mine", empty)
    assert "mine 0.1.0: accepted" in environment.must("attn-backends list", empty)
    assert "mine" in environment.must("attn-backends doctor", empty)
    checked = environment.must("attn-backends check mine --family contract --family builder --device cpu", empty)
    assert "0 not_run" in checked

    for command, folder in {"bench round": "benchmarks", "check --engine vllm": "engine_kits/vllm"}.items():
        refused = environment.run(f"attn-backends {command}", empty)
        assert refused.returncode == 2 and f"in {folder}/ of the repository" in refused.stdout

"""`attn-backends new` writes a backend that passes its checks."""

from importlib import import_module
from pathlib import Path

import pytest

from spec_decode.conformance import check_backend
from tests.factories import CPU


@pytest.mark.slow
def test_new_backend_passes_its_checks(run, monkeypatch):
    assert run("new", "my_own2").exit_code == 0
    monkeypatch.syspath_prepend("my_own2")
    backend = import_module("my_own2.backend").MyOwn2()
    assert backend.name == "my_own2"
    report = check_backend(backend, device=CPU, families=["contract", "builder"], report=True)
    assert report.ok and len(report.results) > 20


def test_new_backend_is_renamed_example(run):
    run("new", "mine")
    written = {path.relative_to("mine").as_posix() for path in Path("mine").rglob("*") if path.is_file()}
    assert {
        "pyproject.toml", "README.md", "mine/builder.py", "mine/backend.py", "mine/known_failures.toml",
        "tests/test_conformance.py", ".github/workflows/ci.yml",
    } <= written  # fmt: skip
    text = "".join(path.read_text() for path in Path("mine").rglob("*") if path.is_file())
    assert not any(name in text for name in ("window_pages", "window-pages", "WindowPages"))
    assert 'mine = "mine.backend:Mine"' in text


def test_existing_folder_is_left_unchanged(refused):
    Path("mine").mkdir()
    Path("mine", "notes").write_text("mine")
    assert "cannot create the folder mine: " in refused("new", "mine")
    assert [path.name for path in Path("mine").iterdir()] == ["notes"]


def test_interrupt_leaves_no_part_of_package(run, monkeypatch, tmp_path):
    write = Path.write_text

    def interrupted(path, *text, **options):
        write(path, *text, **options)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", interrupted)
        assert run("new", "mine").exit_code == 130 and not list(tmp_path.iterdir())
    assert run("new", "mine").exit_code == 0


def test_module_in_current_folder_does_not_block_name(run, monkeypatch, tmp_path):
    Path("mine.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert run("new", "mine").exit_code == 0


REFUSED = {
    "must be lower-case letters": ["My-Own", "9lives", "../up", "a b", ""],
    "a backend's name becomes a module's": [
        *("class", "json", "torch", "numpy", "click", "builders", "spec_decode", "tests", "vllm", "transformers"),
    ],
    "means several backends": ["all", "available"],
    "'triton_paged' is already registered. Choose": ["triton_paged"],
}


@pytest.mark.parametrize(("name", "why"), [(name, why) for why, names in REFUSED.items() for name in names])
def test_invalid_new_backend_name_is_rejected(name, why, refused, tmp_path):
    assert why in refused("new", name) and not list(tmp_path.iterdir())

"""A digest changes only with what the source does; a report records what its run can load."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from spec_decode import conformance, source_digests
from spec_decode.source_digests import SourceRecord, digests_behind, syntax_of

SOURCE = '''"""A module."""
import math

class Config:
    """A class."""

    size: int = 3
    """A field."""

def area(r):
    """An area."""
    # By the book.
    return math.pi * r**2
'''


def text_of(source: str) -> str:
    return syntax_of(ast.parse(source))


@pytest.mark.parametrize(
    "old, new",
    [
        ("# By the book.", "# Otherwise."),
        ('"""An area."""', '"""The area of a circle, in any unit."""'),
        ('    """A field."""\n', ""),
        ("r**2", "r ** 2  # squared"),
        ("import math", "\n\nimport math"),
    ],
)
def test_comments_docstrings_and_layout_do_not_count(old: str, new: str) -> None:
    assert old in SOURCE
    assert text_of(SOURCE) == text_of(SOURCE.replace(old, new))


@pytest.mark.parametrize("old, new", [("r**2", "r**3"), ("size: int", "length: int"), ("= 3", "= 3.0"), ("pi", "tau")])
def test_anything_that_runs_counts(old: str, new: str) -> None:
    assert text_of(SOURCE) != text_of(SOURCE.replace(old, new))


def test_text_that_a_program_uses_counts() -> None:
    assert text_of("x = 'a'") != text_of("x = 'b'")
    assert text_of("x = f'{y:>{n}}a'") != text_of("x = f'{y:>{n}}b'")


@pytest.mark.parametrize(
    ("root", "uses", "leaves_out"),
    [
        # A name that a package lists counts for the module that defines it, an import inside a function counts too, and
        # one for the type checker does not.
        ("attn_backends.triton_paged", "attn_backends.kernels.paged_attention", "attn_backends.flashinfer"),
        ("attn_backends.triton_paged", "builders.spec", "builders"),
        ("spec_decode.graphs.manager", "spec_decode.graphs.cuda", "spec_decode.drafter.drafter"),
        ("spec_decode.conformance.numerics_checks", "spec_decode.testing.oracle", "spec_decode.environment"),
        ("spec_decode.conformance.child", "spec_decode.conformance.runner", "tests.mutants"),
        ("spec_decode.conformance.drafter_checks", "spec_decode.testing.plain_draft", "spec_decode.engine.engine"),
    ],
)
def test_digests_cover_what_a_module_imports(root: str, uses: str, leaves_out: str) -> None:
    found = digests_behind([root])
    assert root in found and uses in found and leaves_out not in found


def test_a_changed_model_ages_no_cell_of_the_kit() -> None:
    """Whose draft checks judge a backend with a model of their own."""
    kit = [f"spec_decode.conformance.{path.stem}" for path in Path(conformance.__file__).parent.glob("*.py")]
    found = digests_behind(kit)
    assert "spec_decode.testing.plain_draft" in found
    assert not [name for name in found if name.startswith("spec_decode.models")]


def test_import_outside_type_checking_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = "if TYPE_CHECKING:\n import builders.spec\nelse:\n import builders.errors\n"
    (tmp_path / "some_plug_in.py").write_text(f"{source}if not typing.TYPE_CHECKING:\n import builders.devices")
    monkeypatch.syspath_prepend(tmp_path)
    found = digests_behind(["some_plug_in"])
    assert {"builders.errors", "builders.devices"} <= found.keys() and "builders.spec" not in found


def test_root_of_another_project_includes_its_modules() -> None:
    assert {"tests.mutants", "tests.page_lists", "builders.spec"} <= digests_behind(["tests.mutants"]).keys()


@pytest.mark.parametrize("root", ["builtins", "no.such_module", ""])
def test_root_without_file_has_no_entry(root: str) -> None:
    assert digests_behind([root]) == {}


def test_parts_share_modules_and_change_separately() -> None:
    record = SourceRecord.of({"a": ["builders.errors"], "b": ["builders.devices"]})
    other = dict.fromkeys(record.modules["builders"], "0" * 8)
    broken = SourceRecord(modules={**record.modules, "builders": other}, parts=record.parts)
    assert record.changed() == () and record.changed(["a"]) == ()
    assert "builders.errors" in broken.changed(["a"]) and "builders.devices" not in broken.changed(["a"])
    assert set(broken.changed(["a", "b"])) == set(broken.changed()) == set(broken.changed(["unheard of"]))
    assert SourceRecord(modules={"builders": {"gone": "0" * 8}}).changed() == ("builders.gone",)


def test_modules_of_a_part_are_sorted() -> None:
    """A file then needs few runs for them."""
    [part] = SourceRecord.of({"": ["attn_backends.torch_reference"]}).parts.values()
    assert list(part) == sorted(part)


def test_modules_of_other_packages_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    read, find = [], source_digests._module
    monkeypatch.setattr(source_digests, "_module", lambda name: read.append(name) or find(name))
    digests_behind(["spec_decode.graphs.emulator"])
    assert {name.partition(".")[0] for name in read} <= {*source_digests.PROJECT}

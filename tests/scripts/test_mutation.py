"""A mutation run: which code it changes or skips, how it draws mutants, and what counts as a death."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from scripts import mutation, mutation_tests
from scripts.mutation import batches, draw, shares
from scripts.mutation_operators import keywords_with_defaults, mutants
from scripts.mutation_rooms import EQUIVALENT, ROOMS
from scripts.mutation_tests import ROOT, TracedTest, functions


def changes(body: str, **defaults: set[str]) -> set[str]:
    return {mutant.after for mutant in mutants("file.py", f"def f(x, y):\n    {body}\n", defaults)}


@pytest.mark.parametrize(
    ("body", "after"),
    [
        ("x = x < y", {"x = x <= y"}),
        ("x = x is not y", {"x = x is y"}),
        ("x = x // y", {"x = x * y"}),
        ("x = x and y", {"x = x or y"}),
        ("x = not y", {"x = y"}),
        ("x = -(x.y)", {"x = (x.y)"}),
        ("x = min(x, y)", {"x = max(x, y)"}),
        ("x = 7", {"x = 8", "x = 6"}),
        ("x = True", {"x = False"}),
        ("x = y[:x]", {"x = y[:x + 1]"}),
        ("x += y", {"pass", "x -= y"}),
        ("y.call(x)", {"pass"}),
        ("return x", {"return None"}),
        ("x = y.sum(x, dtype=y)", {"x = y.sum(x)"}),
    ],
)
def test_an_operator_changes_its_sign_alone(body: str, after: set[str]) -> None:
    assert changes(body) == after


@pytest.mark.parametrize(
    "body",
    [
        '"""One of 3."""',
        'raise ValueError(f"1 + {x}")',
        'x = f"{x + 1}"',
        "x: Literal[1] = y",
        "x = kernel(x, num_warps=4)",
        'x = {"num_stages": 2}',
        "x = isinstance(x, int | float)",
        "return None",
    ],
)
def test_what_no_test_could_or_should_see_is_left_alone(body: str) -> None:
    assert not changes(body)


def test_of_a_requirement_only_the_condition_changes() -> None:
    assert changes("require(x < y, message(1))") == {"pass", "require(x <= y, message(1))"}


def test_only_bodies_change_and_none_of_what_prints() -> None:
    source = "LIMIT = 1\n\n\n@decorated(1)\ndef f(x: Literal[1] = 1) -> Literal[1]:\n    ...\n"
    assert not mutants("file.py", source, {})
    assert not mutants("file.py", "def __repr__(x):\n    return x < 1\n", {})


def test_a_keyword_is_dropped_only_where_the_callee_has_a_default() -> None:
    defaults = keywords_with_defaults({"a.py": "def g(x, *, must, may=1): ...\nclass C:\n    a: int\n    b: int = 1\n"})
    assert changes("x = g(x, must=y, may=y)", **defaults) == {"x = g(x, must=y)"}
    assert changes("x = C(a=y, b=y)", **defaults) == {"x = C(a=y)"}
    assert changes("x = C(b=y, a=y)", **defaults) == {"x = C(a=y)"}
    assert changes("x = C(b=y,)", **defaults) == {"x = C()"}


def test_a_change_stands_where_it_was_found_beyond_ascii_text() -> None:
    source = 'def f(x):\n    y = "×"; return x < 2\n'
    found = {mutant.apply(source) for mutant in mutants("file.py", source, {}) if mutant.operator == "comparison"}
    assert found == {source.replace("<", "<=")}


@pytest.fixture
def few_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """To read, as any others are."""
    for places in ("ROOMS", "PRODUCT"):
        monkeypatch.setattr(mutation, places, ("builders/*.py",))
    monkeypatch.setattr(mutation, "_lines", cache(mutation._lines.__wrapped__))


@pytest.mark.usefixtures("few_files")
def test_a_draw_repeats_and_has_no_two_changes_of_a_line() -> None:
    drawn = draw(60, 3)
    assert drawn == draw(60, 3) != draw(60, 4)
    assert len({(mutant.file, mutant.line) for mutant in drawn}) == len(drawn) == 60
    every = {(mutant.file, mutant.line) for mutant in draw(10**6, 3)}
    assert every > {(mutant.file, mutant.line) for mutant in drawn}


def test_a_file_has_its_share_by_its_lines() -> None:
    assert shares({"a": 70, "b": 20, "c": 10}, 10) == {"a": 7, "b": 2, "c": 1}
    assert shares({"a": 1, "b": 1, "c": 1}, 2) == {"a": 1, "b": 1, "c": 0}


def test_every_room_has_files_and_every_equivalent_change_is_one_that_can_be_drawn() -> None:
    assert all(list(ROOT.glob(pattern)) for pattern in ROOMS)
    defaults = keywords_with_defaults(mutation.sources(mutation_tests.PRODUCT))
    for file, source in mutation.sources(EQUIVALENT).items():
        found = {mutant.apply(source) for mutant in mutants(file, source, defaults)}
        for (old, new), why in EQUIVALENT[file].items():
            assert source.count(old) == 1 and source.replace(old, new) in found and why, old


def test_equivalent_changes_alone_are_not_drawn() -> None:
    file = "builders/batch.py"
    source = (ROOT / file).read_text()
    every = mutants(file, source, {})
    drawn = [mutant for line in mutation._by_line(source, every) for mutant in line]
    left_out = {mutant.apply(source) for mutant in every if mutant not in drawn}
    assert left_out == {source.replace(old, new) for old, new in EQUIVALENT[file]}


def test_quick_tests_of_every_file_come_first_and_the_sessions_apart() -> None:
    def test(name: str, seconds: float, interpreted: bool = False) -> TracedTest:
        return TracedTest(name, interpreted, seconds, frozenset())

    slow, quick, other = test("a.py::slow", 9), test("a.py::quick", 0.5), test("b.py::other", 2)
    kernel, huge = test("k.py::kernel", 1, True), test("a.py::huge", 1000)
    assert batches([slow, quick, other, kernel, huge], 100) == [[quick, other], [kernel], [slow]]


def test_tests_that_enter_few_functions_come_before_those_that_enter_many() -> None:
    whole = TracedTest("a.py::whole", False, 2, frozenset("fgh"))
    about_it = TracedTest("b.py::about_it", False, 5, frozenset("f"))
    assert batches([whole, about_it], 100) == [[about_it, whole]]


def test_all_tests_of_a_module_read_what_one_of_them_does() -> None:
    mutant = mutants("x.py", "def f():\n    return 1\n", {})[0]
    first, second = (
        TracedTest(f"a.py::{name}", False, 1, frozenset(), read)
        for name, read in (("one", frozenset({"x.py"})), ("two", frozenset()))
    )
    entering, other = (
        TracedTest("a.py::f", False, 1, frozenset({"x.py::f"})),
        TracedTest("b.py::g", False, 1, frozenset()),
    )
    assert mutation.tests_of(mutant, [first, second, entering, other]) == ([entering], [first, second])


class TracedCopy:
    """Answers every file with this status, and one test that passes."""

    def __init__(self, folder: Path, status: int | str = 0) -> None:
        self.folder, self.status, self.asked = folder, status, 0

    def run(self, files: list[str], **options: object) -> dict[str, Any]:
        self.asked += 1
        found = {"outcome": "passed", "seconds": 1.0, "functions": []}
        return {"status": self.status, "tests": {f"{files[0]}::one": found}}


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of a project of one file of tests."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/test_a.py").write_text("a")
    monkeypatch.setattr(mutation_tests, "ROOT", tmp_path)
    return tmp_path


def test_tests_are_traced_again_where_they_or_the_product_changed(root: Path) -> None:
    copy, test, source = TracedCopy(root), root / "tests/test_a.py", root / "builders/batch.py"
    runs = []
    for path, text in [(test, "a"), (source, "a"), (source, "a"), (source, "b"), (test, "b"), (test, "b")]:
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        [traced], _ = mutation_tests.traced_tests([copy], ["tests"], root / "kept.json")  # type: ignore[list-item]
        assert traced.name == "tests/test_a.py::one"
        runs.append(copy.asked)
    assert runs == [1, 2, 2, 3, 4, 4]


@pytest.mark.parametrize("status", [2, "hung"])
def test_a_file_whose_tests_could_not_be_collected_or_run_is_named(root: Path, status: int | str) -> None:
    copy = TracedCopy(root, status)
    _, not_passed = mutation_tests.traced_tests([copy], ["tests"], root / "kept.json")  # type: ignore[list-item]
    assert not_passed == [f"tests/test_a.py: {status}"]


def test_what_is_kept_stays_whole_where_a_run_is_stopped_while_it_writes(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy, kept = TracedCopy(root), root / "kept.json"
    mutation_tests.traced_tests([copy], ["tests"], kept)  # type: ignore[list-item]
    (root / "tests/test_a.py").write_text("b")

    def stopped(path: Path, content: Any) -> None:
        with path.open("wb" if isinstance(content, bytes) else "w") as file:
            file.write(content[:10])
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        for name in ("write_text", "write_bytes"):
            patch.setattr(Path, name, stopped)
        mutation_tests.traced_tests([copy], ["tests"], kept)  # type: ignore[list-item]
    mutation_tests.traced_tests([copy], ["tests"], kept)  # type: ignore[list-item]
    assert copy.asked == 3


@pytest.mark.usefixtures("few_files")
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--tests", "tests", "tests/typo"], "must name files and folders of the project, got tests/typo."),
        (["--only", "nowhere.py"], "no drawn mutant has a file:line that starts with 'nowhere.py'"),
    ],
)
def test_a_run_that_would_try_nothing_is_refused(
    arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["mutation.py", "--json", "FILE", "--count", "1", *arguments])
    with pytest.raises(SystemExit):
        mutation.main()
    assert said in capsys.readouterr().err


def test_a_function_is_named_with_what_it_is_in() -> None:
    source = "class C:\n    @property\n    def f(self):\n        def g(): ...\n"
    assert functions(source) == (("C.f", 2, 4), ("C.f.g", 4, 4))


@pytest.mark.parametrize(
    ("sound", "outcome"),
    [("passed", "killed"), ("failed", "survived")],
    ids=["by its test alone", "not by one that fails"],
)
def test_a_change_dies_of_a_test_that_passes_without_it(tmp_path: Path, sound: str, outcome: str) -> None:
    (mutant,) = [each for each in mutants("f.py", SOURCE, {}) if each.operator == "comparison"]
    copy = FakeCopy(tmp_path, sound)
    tests = [TracedTest(name, False, 0.1, frozenset({"f.py::f"})) for name in ("a.py::good", "a.py::bad")]

    result = mutation.attempt(copy, mutant, tests, 100)  # type: ignore[arg-type]

    assert result.outcome == outcome and (tmp_path / "f.py").read_text() == SOURCE
    assert copy.asked == [["a.py::good", "a.py::bad"], ["a.py::bad"]]


def test_tests_behind_one_that_fails_without_the_change_are_tried_too(tmp_path: Path) -> None:
    class Stops(FakeCopy):
        """At the first test that fails, as a session does; `broken` fails without the change too."""

        def run(self, tests: list[str], **options: Any) -> dict[str, Any]:
            if "a.py::broken" in tests:
                self.asked.append(tests)
                return {"status": 1, "tests": {"a.py::broken": {"outcome": "failed"}}}
            return super().run(tests, **options)

    (mutant,) = [each for each in mutants("f.py", SOURCE, {}) if each.operator == "comparison"]
    copy = Stops(tmp_path, "passed")
    tests = [TracedTest(name, False, 0.1, frozenset({"f.py::f"})) for name in ("a.py::broken", "a.py::bad")]

    result = mutation.attempt(copy, mutant, tests, 100)  # type: ignore[arg-type]

    assert (result.outcome, result.by) == ("killed", "a.py::bad")
    assert copy.asked == [["a.py::broken", "a.py::bad"], ["a.py::broken"], ["a.py::bad"], ["a.py::bad"]]


SOURCE = "def f(x):\n    return x < 2\n"


class FakeCopy:
    """Of a file that `bad` looks at. sound: how that ends without a change."""

    def __init__(self, folder: Path, sound: str) -> None:
        self.folder, self.sound, self.asked = folder, sound, list[list[str]]()
        (folder / "f.py").write_text(SOURCE)

    def run(self, tests: list[str], *, interpreted: bool, seconds: dict[str, float]) -> dict[str, object]:
        self.asked.append(tests)
        bad = self.sound if (self.folder / "f.py").read_text() == SOURCE else "failed"
        found = {name: {"outcome": bad if name.endswith("bad") else "passed"} for name in tests}
        return {"status": int(bad == "failed"), "tests": found}

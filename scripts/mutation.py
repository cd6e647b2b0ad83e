"""Mutate the product's code and count how many mutants the tests kill: python scripts/mutation.py --json FILE.

Mutants are drawn with a fixed seed, from each file in proportion to its length. Each is tried in a copy of the project
with the tests of `make test` that enter its function; it dies if one of them fails, crashes or never ends. The report
lists every survivor; the script fails if fewer than --least percent die.

The folder --kept caches which tests enter which function, until the product or the test file changes, and which test
killed which mutant, until that test file or the mutated file changes. Remove the folder to start afresh.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from itertools import groupby
from pathlib import Path
from statistics import mean
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from attn_backends import registry
from scripts.free_places import share
from scripts.mutation_operators import Mutant, keywords_with_defaults, mutants
from scripts.mutation_rooms import EQUIVALENT, ROOMS
from scripts.mutation_tests import PRODUCT, ROOT, Copy, TracedTest, digest, sources, traced_tests
from scripts.script_report import write_report
from spec_decode.files import write_whole

SCHEMA = "attn-mutation/1"
ROOTS = ("scripts.mutation", "spec_decode.engine.engine")
"""The engine imports everything that is mutated."""
ABOUT_MUTANTS = "tests/scripts/test_mutation.py"
"""Its tests look up the lines of equivalent mutants, so any other change to such a line fails them."""
QUICK, QUICK_FILE = 15, 1
"""Seconds of tests to try first, in total and per test file."""
READERS = 30
"""Seconds of tests, tried last, that only read the text of the file."""


@dataclass(frozen=True)
class Result:
    """The outcome of a mutant. by: the test that failed, or how the session ended; empty for a survivor."""

    mutant: Mutant
    outcome: str
    by: str
    tests: int


def draw(count: int, seed: int) -> list[Mutant]:
    """Draw mutants from the rooms: one per line at most, so fewer than `count` if there are not as many lines. Mutants
    known to be equivalent are left out."""
    lines, found = _lines(), list[Mutant]()
    for file, number in shares({file: len(of_file) for file, of_file in lines.items()}, count).items():
        chance = random.Random(f"{seed} {file}")
        found += [_one_of(line, chance) for line in chance.sample(lines[file], min(number, len(lines[file])))]
    return found


@cache
def _lines() -> dict[str, list[list[Mutant]]]:
    """Return, by file, the mutants of each line that has any."""
    defaults = keywords_with_defaults(sources(PRODUCT))
    return {file: _by_line(source, mutants(file, source, defaults)) for file, source in sources(ROOMS).items()}


def _by_line(source: str, found: Sequence[Mutant]) -> list[list[Mutant]]:
    """Group mutants by line, without those known to be equivalent."""
    known = {source.replace(old, new) for mutant in found[:1] for old, new in EQUIVALENT.get(mutant.file, {})}
    distinct = [mutant for mutant in found if not known or mutant.apply(source) not in known]
    return [list(group) for _, group in groupby(distinct, lambda mutant: mutant.line)]


def _one_of(line: Sequence[Mutant], chance: random.Random) -> Mutant:
    """Draw the operator first: constants outnumber all other mutants."""
    operator = chance.choice(sorted({mutant.operator for mutant in line}))
    return chance.choice([mutant for mutant in line if mutant.operator == operator])


def shares(lines: Mapping[str, int], count: int) -> dict[str, int]:
    """Divide count among the files in proportion to their mutable lines, by largest remainder."""
    exact = {file: count * number / sum(lines.values()) for file, number in lines.items()}
    found = {file: int(part) for file, part in exact.items()}
    by_remainder = sorted(exact, key=lambda file: found[file] - exact[file])
    for file in by_remainder[: count - sum(found.values())]:
        found[file] += 1
    return found


def batches(tests: Sequence[TracedTest], most: float) -> list[list[TracedTest]]:
    """Order the tests: first a few of each file, then the rest, up to `most` seconds of them."""
    quick: list[TracedTest] = []
    rest: list[TracedTest] = []
    for _, of_file in groupby(sorted(tests, key=lambda test: (test.interpreted, test.file, test.seconds)), _file):
        taken = 0.0
        for test in of_file:
            (quick if not taken or taken + test.seconds < QUICK_FILE else rest).append(test)
            taken += test.seconds
    first, late = _within(_by_file(quick), QUICK)
    others, _ = _within(_by_file([*late, *rest]), most)
    return [
        batch
        for part in (first, others)
        for interpreted in (False, True)
        if (batch := [test for test in part if test.interpreted is interpreted])
    ]


def _file(test: TracedTest) -> tuple[bool, str]:
    return test.interpreted, test.file


def _by_file(tests: Iterable[TracedTest]) -> list[TracedTest]:
    """Sort by file; files whose tests enter the fewest functions come first, since they target the changed one."""
    entered: dict[tuple[bool, str], list[int]] = {}
    tests = list(tests)
    for test in tests:
        entered.setdefault(_file(test), []).append(len(test.functions))
    return sorted(tests, key=lambda test: (mean(entered[_file(test)]), _file(test), test.seconds))


def _within(tests: Iterable[TracedTest], seconds: float) -> tuple[list[TracedTest], list[TracedTest]]:
    """Split the tests into those that fit into `seconds` (at least one) and the others."""
    inside: list[TracedTest] = []
    outside: list[TracedTest] = []
    for test in tests:
        seconds -= test.seconds
        (inside if seconds > 0 or not inside else outside).append(test)
    return inside, outside


def tests_of(mutant: Mutant, tests: Sequence[TracedTest]) -> tuple[list[TracedTest], list[TracedTest]]:
    """Return the tests that enter the mutant's function, and its readers: tests of files in which some test reads its
    file, since a module can cache that text. If no test enters the function, which can run on import, others of its
    file count."""
    function = f"{mutant.file}::{mutant.function}"
    entering = [test for test in tests if function in test.functions]
    if not entering:
        entering = [test for test in tests if any(name.startswith(f"{mutant.file}::") for name in test.functions)]
    reading = {test.file for test in tests if mutant.file in test.read}
    return entering, [test for test in tests if test.file in reading and test not in entering]


def attempt(copy: Copy, mutant: Mutant, tests: Sequence[TracedTest], most: float) -> Result:
    """Run tests on a mutant until one fails that passes without the change."""
    tried = 0
    entering, readers = tests_of(mutant, tests)
    waiting = [*batches(entering, most), *batches(readers, READERS)]
    while waiting:
        batch = waiting.pop(0)
        with changed(copy, mutant):
            answer = _run(copy, batch)
        tried += len(answer["tests"])
        failed = [name for name, found in answer["tests"].items() if found["outcome"] == "failed"]
        # Every test passed, or none of the requested tests is left.
        if answer["status"] in (0, 5):
            continue
        suspects = [test for test in batch if test.name in failed] or batch
        if _run(copy, suspects)["status"] in (0, 5):
            by = failed[0] if failed else f"the session: {answer['status']}"
            return Result(mutant, "hung" if answer["status"] == "hung" else "killed", by, tried)
        # They also fail, or do not run, without the change, so they prove nothing. Tests after them still can.
        if rest := [test for test in batch if test not in suspects and test.name not in answer["tests"]]:
            waiting.insert(0, rest)
    return Result(mutant, "survived", "", tried)


def _run(copy: Copy, batch: Sequence[TracedTest]) -> dict[str, Any]:
    seconds = {test.name: test.seconds for test in batch}
    return copy.run(list(seconds), interpreted=batch[0].interpreted, seconds=seconds)


@contextmanager
def changed(copy: Copy, mutant: Mutant) -> Iterator[None]:
    """Apply the mutant to the copy for the duration of the block."""
    path = copy.folder / mutant.file
    source = path.read_text()
    path.write_text(mutant.apply(source))
    try:
        yield
    finally:
        path.write_text(source)


class Deaths:
    """A file of which test killed which mutant; an entry holds until the mutated file or the test file changes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: dict[str, dict[str, str]] = json.loads(path.read_text()) if path.exists() else {}
        self._lock = threading.Lock()

    def add(self, result: Result) -> None:
        """Record the result if a test killed the mutant, by failing or by hanging."""
        file = ROOT / result.by.partition("::")[0]
        if result.outcome != "survived" and file.is_file():
            with self._lock:
                known = {"by": result.by, "test": digest(file.read_text()), "outcome": result.outcome}
                self._known[self._key(result.mutant)] = known
                write_whole(self._path, json.dumps(self._known).encode())

    def find(self, mutant: Mutant) -> Result | None:
        """Return how the mutant died, if that still holds."""
        known = self._known.get(self._key(mutant), {"by": "", "test": ""})
        file = ROOT / known["by"].partition("::")[0]
        holds = file.is_file() and digest(file.read_text()) == known["test"]
        return Result(mutant, known.get("outcome", "killed"), known["by"], 0) if holds else None

    @staticmethod
    def _key(mutant: Mutant) -> str:
        return f"{mutant.file} {digest(mutant.apply((ROOT / mutant.file).read_text()))}"


def room_of(file: str) -> str:
    """Return the package of a file; kernels count to the package they belong to."""
    return str(Path(file).parent).removesuffix("/kernels").removesuffix("/strategies")


def table(results: Sequence[Result]) -> str:
    drawn = Counter(room_of(result.mutant.file) for result in results)
    dead = Counter(room_of(result.mutant.file) for result in results if result.outcome != "survived")
    rows = [*((room, dead[room], drawn[room]) for room in sorted(drawn)), ("all", dead.total(), drawn.total())]
    return "\n".join(f"{room:30} {killed:4} of {total:4} died" for room, killed, total in rows)


def say(result: Result) -> None:
    """Print one line, and the change itself if it survived."""
    mutant = result.mutant
    print(f"{result.outcome}  {mutant.file}:{mutant.line}  {mutant.operator}  {result.by}", flush=True)
    if result.outcome == "survived":
        print(f"    {mutant.before}\n -> {mutant.after}   ({result.tests} tests)", flush=True)


def main() -> None:
    """Draw mutants, try them, and write the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True, help="report file to write")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--least", type=float, default=90, help="percentage of mutants that must die")
    parser.add_argument("--most", type=float, default=300, help="seconds of tests to try on each mutant")
    parser.add_argument("--tests", nargs="+", default=["tests"], help="test files and folders; all by default")
    parser.add_argument("--only", default="", help="only mutants whose file:line starts with this")
    parser.add_argument("--kept", type=Path, default=ROOT / "build/mutation", help="cache folder")
    flags = parser.parse_args()
    if missing := [path for path in flags.tests if not (ROOT / path).exists()]:
        parser.error(f"--tests must name files and folders of the project, got {', '.join(missing)}.")
    drawn = [each for each in draw(flags.count, flags.seed) if f"{each.file}:{each.line}".startswith(flags.only)]
    if not drawn:
        parser.error(
            f"no drawn mutant has a file:line that starts with {flags.only!r}. Raise --count, or change --only."
        )
    flags.kept.mkdir(parents=True, exist_ok=True)
    deaths = Deaths(flags.kept / "deaths.json")
    with tempfile.TemporaryDirectory() as folder:
        copies = [Copy(Path(folder, str(job))) for job in range(flags.jobs)]
        traced, not_passed = traced_tests(copies, flags.tests, flags.kept / "traced.json")
        tests = [test for test in traced if test.file != ABOUT_MUTANTS]

        def work(copy: Copy, mutant: Mutant) -> Result:
            result = deaths.find(mutant) or attempt(copy, mutant, tests, flags.most)
            deaths.add(result)
            say(result)
            return result

        results = share(copies, drawn, work)
        for copy in copies:
            copy.close()
    outcomes = Counter(result.outcome for result in results)
    print(table(results))
    write_report(
        flags.json, SCHEMA, torch.device("cpu"), ROOTS, backends=registry.names(), outcomes=outcomes,
        left_out=[{"file": file, "before": before, "after": after, "why": why}
                  for file, changes in EQUIVALENT.items() for (before, after), why in changes.items()],
        not_passed=not_passed, mutants=[_row(result) for result in results],
    )  # fmt: skip
    if 100 * (len(results) - outcomes["survived"]) < flags.least * len(results):
        raise SystemExit(1)


def _row(result: Result) -> dict[str, object]:
    shown = {name: value for name, value in asdict(result.mutant).items() if name not in ("begin", "end", "text")}
    return {**shown, "outcome": result.outcome, "by": result.by, "tests": result.tests}


if __name__ == "__main__":
    main()

"""The Makefile names tests that exist, since pytest runs nothing if a path is missing, and prints what it will do."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8").replace("\\\n", " ")


def with_prefix(variable: str) -> list[str]:
    """Paths of a variable of the form $(addprefix PREFIX,NAME NAME ...)."""
    ((prefix, names),) = re.findall(rf"^{variable} := \$\(addprefix ([^,]+),(.*)\)$", MAKEFILE, re.MULTILINE)
    return [prefix + name for name in names.split()]


def test_paths_of_oldest_and_newest_exist() -> None:
    (tests,) = re.findall(r"^RELEASE_TESTS := (.*)$", MAKEFILE, re.MULTILINE)
    paths = [*tests.split(), *with_prefix("RELEASE_KERNELS")]
    assert len(paths) > 10 and [path for path in paths if not (ROOT / path).exists()] == []


def pinned_triton(file: str) -> tuple[int, int, int]:
    (pin,) = re.findall(r"^triton==(\d+)\.(\d+)\.(\d+)$", (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE)
    major, minor, patch = map(int, pin)
    return major, minor, patch


def test_older_triton_is_each_minor_release_before_that_of_every_test() -> None:
    (listed,) = re.findall(r"^OLDER_TRITON := (.*)$", MAKEFILE, re.MULTILINE)
    oldest, present = pinned_triton("constraints-oldest.txt"), pinned_triton("constraints.txt")
    assert listed.split()[0] == "{}.{}.{}".format(*oldest)
    assert [release.rpartition(".")[0] for release in listed.split()] == [
        f"{oldest[0]}.{minor}" for minor in range(oldest[1], present[1])
    ]


def test_ci_always_compiles_with_older_triton(tmp_path: Path) -> None:
    """From the folder that pip fills, a test that exists."""
    assert re.search(r"^timed make .*\bolder-triton\b", (ROOT / ".ci/run").read_text(encoding="utf-8"), re.MULTILINE)
    command = ["make", "-n", "triton-3.5.0", f"VENV={tmp_path}"]
    planned = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout
    installed, run = f"--target {tmp_path}/triton/3.5.0 triton==3.5.0\n", f"PYTHONPATH={tmp_path}/triton/3.5.0 "
    assert installed in planned.replace("\\\n\t", "").partition(run)[0]
    (file, test, chip) = re.findall(r'pytest -q "(\S+)::(\w+)\[(\w+)\]"', planned.partition(run)[2])[0]
    assert f"def {test}(" in (ROOT / file).read_text(encoding="utf-8") and chip == "sm_90"


def test_precheck_runs_the_fast_gates_of_the_page() -> None:
    page = (ROOT / "docs/what-will-stop-you.md").read_text(encoding="utf-8")
    fast = page.partition("## Slower")[0]
    gates = re.findall(r"^\| `(tests/[^`]+\.py)` \|", fast, re.MULTILINE)
    assert set(gates) == set(with_prefix("PRECHECKS")) and len(gates) > 5
    assert [path for path in re.findall(r"`(tests/[^`]+)`", page) if not (ROOT / path).exists()] == []


def test_a_target_on_a_page_exists() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    named = {
        name for page in pages for name in re.findall(r"(?:^|`)make ([\w-]+)", page.read_text(encoding="utf-8"), re.M)
    }
    (targets,) = re.findall(r"^\.PHONY: (.*)$", MAKEFILE, re.MULTILINE)
    assert len(named) > 5 and named <= set(targets.split())


def test_setup_first_prints_download_size_and_time(tmp_path: Path) -> None:
    planned = ["make", "-n", "demo", f"VENV={tmp_path}"]
    commands = subprocess.run(planned, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout
    before, _, after = commands.partition('echo "make: setting up ')
    message = after.partition('"')[0]
    assert message.startswith(str(tmp_path)) and "3 GB to download" in message and "2 minutes" in message
    assert "pip install" not in before and "-m venv" not in before and "pip install" in after

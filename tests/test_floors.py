"""Imports point one way: between floors, between rooms of spec_decode, and inside every folder; in the sources and once
everything is loaded. And nothing is imported before it is used."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from tests.import_graph import (
    FLOORS,
    ROOT,
    Uses,
    circles,
    imported,
    loaded_by,
    loaded_uses,
    module_files,
    source_uses,
    uses_here,
)
from tests.test_third_party import packages
from tests.users import USERS

OUTSIDE = ["tests", "examples", "scripts", "train_pair"]
ROOMS = [
    "files", "environment", "source_digests",
    "graphs", "sampling", "trees", "verification", "model_api", "paged", "drafter",
    "testing", "conformance", "engine", "models", "llm", "__init__", "tools", "matrix", "cli", "__main__",
]  # fmt: skip
"""What may stand in the root of spec_decode. A room uses only those before it."""
SERVING = ("graphs", "sampling", "trees", "verification", "model_api", "paged", "drafter", "engine")
PRODUCTION = (*SERVING, "tools.metadata_validator")
"""What serves requests, and what may look on while it does."""
LIMIT = 6
"""Modules in the root of spec_decode, at most."""


def room_of(module: str) -> str:
    return module.split(".")[1] if module.startswith("spec_decode.") else ""


def upwards(uses: Uses) -> set[tuple[str, str]]:
    """Uses of a room by one that stands before it."""
    pairs = [(module, use) for module, used in uses.items() for use in used if room_of(module) and room_of(use)]
    return {(module, use) for module, use in pairs if ROOMS.index(room_of(module)) < ROOMS.index(room_of(use))}


@pytest.fixture(scope="module")
def sources() -> Uses:
    return uses_here()


LATE = {
    "the help of a verb, but for bench's, which no wheel has, loads no torch": """
from click.testing import CliRunner
from spec_decode.cli.main import main
verbs = main.commands.keys() - {"bench"}
assert not any(CliRunner().invoke(main, [verb, "--help"]).exit_code for verb in verbs)
assert "torch" not in sys.modules
""",
    "finding a device loads no triton": """
from spec_decode.cli.options import resolve_device
resolve_device("cpu")
assert not {"triton", "builders"} & sys.modules.keys()
""",
    "loading a draft loads no transformers, and no compiler of torch, which takes a second or more": """
from spec_decode.models import SHIPPED_PAIR, load_draft, load_pair
load_pair(SHIPPED_PAIR)
assert not {"transformers", "torch._dynamo"} & sys.modules.keys()
""",
    "a capture in the emulator loads no compiler of torch": """
import torch
from spec_decode.graphs import runtime_for
cell = torch.zeros(1)
runtime_for(cell.device).capture(lambda: cell.add_(1)).replay()
assert cell.item() == 1 and "torch._dynamo" not in sys.modules
""",
}
"""What is imported only on use: each part may load more than the part before it."""
EVERYTHING = """
import runpy
runpy.run_module("tests.import_graph", run_name="__main__")
"""


@dataclass(frozen=True)
class Loading:
    """Which parts of LATE came to their end, the modules that came with them and with what serves requests, and what
    the modules hold once everything is loaded."""

    late: list[str]
    production: list[str]
    uses: Uses


@pytest.fixture(scope="module")
def loading() -> Loading:
    """Another process loads everything: in this one the tests have put their own things into modules."""
    script = "import sys\n" + "".join(f"{part}print({name!r})\n" for name, part in LATE.items()) + EVERYTHING
    command = [sys.executable, "-c", script, *(f"spec_decode.{name}" for name in PRODUCTION)]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    *late, last = done.stdout.splitlines()
    found = json.loads(last)
    return Loading(late, found["first"], {module: set(used) for module, used in found["uses"].items()})


def test_nothing_is_imported_before_it_is_used(loading: Loading) -> None:
    assert loading.late == list(LATE)


@pytest.fixture(scope="module")
def loads() -> dict[str, dict[str, Path]]:
    """Our modules that each user loads, with their files."""
    return dict(zip(USERS, loaded_by(*(script for script, _ in USERS.values())), strict=True))


def test_the_plug_in_for_vllm_imports_only_torch_and_triton_of_our_requirements(
    loads: dict[str, dict[str, Path]],
) -> None:
    files = loads["plug-in, linear layers"]
    assert {"attn_backends.flash_attn3", "attn_backends.flashmla", "attn_backends.engines.vllm.validator"} <= {*files}
    used = set().union(*(packages(path.read_text(encoding="utf-8")) for path in files.values()))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    required = {re.split(r"[^\w-]", each)[0].replace("-", "_") for each in project["dependencies"]}
    assert required & used == {"torch", "triton"}


@pytest.fixture(scope="module")
def loaded(loading: Loading) -> Uses:
    return loading.uses


@pytest.mark.parametrize("floor", FLOORS)
def test_floor_imports_nothing_above(floor: str) -> None:
    above = {*FLOORS[FLOORS.index(floor) + 1 :], *OUTSIDE}
    found = [
        f"{module} imports {name}"
        for module, path in module_files(floors=[floor]).items()
        for name in sorted(imported(path.read_text(encoding="utf-8"), module))
        if name.split(".")[0] in above
    ]
    assert not found


def test_loaded_floor_refers_to_nothing_above(loaded: Uses) -> None:
    floor = {name: height for height, name in enumerate(FLOORS)}
    found = [
        (module, use)
        for module, used in loaded.items()
        for use in used
        if floor[module.split(".")[0]] < floor[use.split(".")[0]]
    ]
    assert not found


def test_an_engines_room_is_imported_by_nothing_else(sources: Uses) -> None:
    room = "attn_backends.engines."
    library = {name: used for name, used in sources.items() if name.split(".")[0] in FLOORS[:3]}
    assert not {name for name, used in library.items() for use in used if use.startswith(room) > name.startswith(room)}


def test_spec_decode_root_has_rooms_and_few_modules() -> None:
    folder = ROOT / "spec_decode"
    modules = [path.stem for path in folder.glob("*.py")]
    rooms = [path.parent.name for path in folder.glob("*/__init__.py")]
    assert {*modules, *rooms} == set(ROOMS)
    assert len(modules) <= LIMIT


@pytest.mark.parametrize("kind", ["sources", "loaded"])
def test_room_uses_only_earlier_rooms(kind: str, request: pytest.FixtureRequest) -> None:
    assert upwards(request.getfixturevalue(kind)) == set()


@pytest.mark.parametrize("kind", ["sources", "loaded"])
def test_files_and_folders_have_no_import_cycles(kind: str, request: pytest.FixtureRequest) -> None:
    assert circles(request.getfixturevalue(kind)) == []


def test_no_file_imports_itself() -> None:
    """Looking for what defines such a name would not end."""
    files = module_files()
    assert [m for m, path in files.items() if m in imported(path.read_text(encoding="utf-8"), m, files)] == []


def test_engine_uses_only_public_drafter_names(sources: Uses) -> None:
    """Its target runner uses none of the drafter."""
    used_by = {module: {use for use in used if room_of(use) == "drafter"} for module, used in sources.items()}
    engine = {module: used for module, used in used_by.items() if room_of(module) == "engine"}
    assert set().union(*engine.values()) == {"spec_decode.drafter.__init__"}
    assert engine["spec_decode.engine.target_runner"] == set()


@pytest.mark.parametrize("user", USERS)
def test_a_user_loads_no_more_than_its_budget(user: str, loads: dict[str, dict[str, Path]]) -> None:
    _, budget = USERS[user]
    lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in loads[user].values())
    assert 0.8 * budget < lines <= budget


def test_the_plug_in_for_vllm_loads_no_linear_layers_before_a_model_chooses_them(
    loads: dict[str, dict[str, Path]],
) -> None:
    room = "attn_backends.kernels.linear"
    assert not [name for name in loads["plug-in"] if name.startswith(room)]


@pytest.mark.parametrize("user", ["drafter", "kit", "check"])
def test_a_drafter_and_a_check_load_no_model_that_ships(user: str, loads: dict[str, dict[str, Path]]) -> None:
    rooms = {room_of(module) for module in loads[user]}
    assert not rooms & {"models", "verification", "engine", "llm", "matrix", "tools"}
    assert ("conformance" in rooms) is (user != "drafter")


def test_most_modules_were_loaded(loaded: Uses) -> None:
    """Those that were not are commands, or need a package that is not installed here."""
    assert len(loaded) > 0.9 * len(module_files())


def test_production_code_loads_no_checks(loading: Loading) -> None:
    assert {f"spec_decode.{name}" for name in PRODUCTION} <= {*loading.production}
    assert not [name for name in loading.production if name.startswith("spec_decode.conformance")]


@pytest.mark.parametrize(
    "line",
    [
        "import spec_decode.conformance.report",
        "from spec_decode.conformance import report",
        "from . import report",
        "from ..conformance.report import Report",
        "def late():\n    from spec_decode.conformance.report import Report",
        "if TYPE_CHECKING:\n    import torch, spec_decode.conformance.report",
    ],
)
def test_every_import_form_is_recognised(line: str) -> None:
    known = "spec_decode.conformance.report"
    assert imported(line, "spec_decode.conformance.check", [known]) & {known}


def test_module_name_in_text_is_no_import() -> None:
    assert imported('"""See spec_decode.drafter.drafter."""\nname = "spec_decode"') == set()


def test_importing_a_name_uses_its_package(tmp_path: Path) -> None:
    files = make_modules(tmp_path, one="from spec_decode.two import Name", **{"two/__init__": ""})
    assert source_uses(files)["spec_decode.one"] == {"spec_decode.two.__init__"}


def test_use_of_later_room_is_detected() -> None:
    assert upwards({"spec_decode.graphs.manager": {"spec_decode.cli.main", "spec_decode.files", "builders.spec"}}) == {
        ("spec_decode.graphs.manager", "spec_decode.cli.main")
    }


def test_cycles_of_rooms_and_files_are_detected() -> None:
    uses = {
        "spec_decode.a.one": {"spec_decode.b.one"},
        "spec_decode.b.two": {"spec_decode.c"},
        "spec_decode.c": {"spec_decode.a.two"},
        "spec_decode.d.one": {"spec_decode.d.__init__"},
        "spec_decode.d.__init__": {"spec_decode.d.one", "spec_decode.a.one"},
    }
    assert circles(uses) == [
        ["spec_decode.a", "spec_decode.b", "spec_decode.c"],
        ["spec_decode.d.__init__", "spec_decode.d.one"],
    ]


@pytest.mark.parametrize(
    "later",
    [
        "import spec_decode_mutant.low\nspec_decode_mutant.low.HOOKS.append(lambda: 0)",
        "from spec_decode_mutant.low import HOOKS\nclass Hook: ...\nHOOKS.append(Hook)",
        "from spec_decode_mutant import low\ndef run(self): ...\nlow.Base.run = run",
        "import sys\nfrom spec_decode_mutant import low\nlow.module = sys.modules[__name__]",
    ],
)
def test_runtime_reference_between_modules_is_detected(
    later: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = make_modules(tmp_path, "spec_decode_mutant", low="HOOKS = []\nclass Base: ...", high=later)
    monkeypatch.syspath_prepend(tmp_path)
    try:
        assert source_uses(files)["spec_decode_mutant.low"] == set()
        assert loaded_uses(files)["spec_decode_mutant.low"] == {"spec_decode_mutant.high"}
    finally:
        for name in [name for name in sys.modules if name.startswith("spec_decode_mutant")]:
            del sys.modules[name]


def make_modules(root: Path, package: str = "spec_decode", **sources: str) -> dict[str, Path]:
    for name, source in {"__init__": "", **sources}.items():
        path = root / package / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    return module_files(root, [package])

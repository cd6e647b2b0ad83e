"""Words that this project no longer uses for the things named here, and how to find them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

from tests.import_graph import FLOORS, ROOT, parsed

FOLDERS = [*FLOORS, "tests", "scripts", "examples", "docs"]
PAGES = ["README.md", "CONTRIBUTING.md"]
EXEMPT = ["docs/compatibility.html", "tests/retired_words.py", "tests/docs/test_glossary.py"]
"""Made from reports, which keep what they said; this list and its test. The changelog names old words on purpose."""

ANYWHERE = ("",)
DRAFTING = ("spec_decode/paged", "spec_decode/drafter", "spec_decode/graphs", "spec_decode/engine", "docs")
ENGINE = ("spec_decode/engine",)
RUNNING = ("spec_decode/paged", "spec_decode/drafter", "spec_decode/engine")
KIT = ("spec_decode/conformance", "spec_decode/testing")
VERIFYING = ("spec_decode/verification", "spec_decode/sampling", "spec_decode/drafter", "spec_decode/engine", "docs")
"""Rooms in which a word means what is given here. Each stands for its tests as well."""

NAMES: dict[tuple[str, ...], dict[str, str]] = {
    ANYWHERE: {
        "settle_pass": "update_requests", "begin_pass": "prepare_inputs", "PassState": "step hooks",
        "Verdict": "VerifyOutput", "Refusal": "Residual", "keep_count": "synthetic_accept", "hot": "is_random",
        "target_features": "target_hidden_states", "feature_layers": "aux_hidden_state_layers",
        "keep_last": "gather_accepted", "going": "continue_flag",
        "Phase": "StepBuffers", "CallOutside": "SplitOp", "watch": "validate", "apart": "isolate", "Apart": "isolated",
        "World": "PagedFixture", "Stage": "fixture", "Side": "candidate, reference", "played": "draft fixture",
        "demand": "require_supported", "raised_in": "error_location", "Word": "Status", "FINE": "OK",
        "LatentNorm": "KvANormRope", "Extras": "LayerOptions", "Fields": "ConfigReader",
        "packed_latent": "fp8_ds_mla", "PackedLatents": "fp8_ds_mla", "PACKED": "fp8_ds_mla", "_PACKED": "fp8_ds_mla",
        "first_position": "position_offset", "first_positions": "draft_positions",
        "advance_shared_state": "advance_state", "begin_extend": "set_extend_state",
        "begin_decode": "set_decode_state", "begin_in_graph": "advance_to", "run_extend": "run_step_0",
        "run_decode": "run_later_step", "build_round": "build_round_metadata",
        "Attend": "Attention", "attend_with": "PagedAttention", "Rotation": "Rope",
    },
    ENGINE: {
        "Rows": "InputBatch", "seat": "condense", "join": "add", "Job": "RequestState", "_News": "pending outputs",
        "_hear": "process_outputs", "_deliver": "process_outputs", "_telling": "stream callback",
        "Readback": "AsyncOutput", "reap": "free_finished", "reach": "max_slots", "Limits": "config validation",
    },
    RUNNING: {"outside": "uncaptured"},
    VERIFYING: {"tops": "partial max", "stands": "accepted"},
    KIT: {"smallest": "shrink", "Words": "reasons"},
}  # fmt: skip
"""Names that nothing may be defined by, with what took their place."""

PARTS: dict[tuple[str, ...], dict[str, str]] = {
    ANYWHERE: {
        "settle": "update", "coin": "uniform", "coins": "uniform", "heat": "temperature", "heats": "temperature",
        "mass": "sum of exponentials", "upkeep": "MetadataUpdate", "obstacle": "unsupported_reason",
        "obstacles": "unsupported_reasons", "scene": "draft fixture", "scenes": "draft fixture",
        "honest": "low-precision reference", "multiprocessors": "num_sms", "weak": "rebuild",
    },
    VERIFYING: {"verdict": "VerifyOutput", "verdicts": "VerifyOutput", "judge": "verify", "judges": "verify"},
    KIT: {"truth": "fp64 reference"},
}  # fmt: skip
"""Words that no name may have among its parts: neither weak_groups nor WeakGroup."""

PHRASES: dict[tuple[str, ...], dict[str, str]] = {
    ANYWHERE: {
        "upkeep": "metadata update", "weak": "rebuild (group)", "coins?": "uniform", "honest(ly)?": "low-precision",
        "seat(s|ed)?": "row", "target's pass(es)?": "step", "draft's pass(es)?": "step", "engine's pass(es)?": "step",
        "times? round": "iteration", "under watch": "validated", "--apart": "--isolate",
        "--watch": "--validate-metadata", "packed (fp8|pages?|latents?|caches?)": "fp8_ds_mla",
    },
    VERIFYING: {"verdicts?": "result of verification", "judge[ds]?": "verify", "judging": "verify"},
    DRAFTING: {"obstacles?": "reason"},
}  # fmt: skip
"""Phrases for comments, messages and pages, in lower case, each with one way to begin. The other words above are plain
English there."""

_PART = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")


def files() -> Iterator[tuple[str, str]]:
    """Paths and texts of the sources and pages that are searched."""
    paths = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".md", ".svg")]
    for path in sorted([*paths, *(ROOT / page for page in PAGES)]):
        name = path.relative_to(ROOT).as_posix()
        if name not in EXEMPT:
            yield name, path.read_text(encoding="utf-8")


def retired(name: str, text: str) -> set[str]:
    """Retired names and phrases in a file."""
    found = retired_phrases(name, text)
    return found | retired_names(name, text) if name.endswith(".py") else found


def retired_names(name: str, source: str) -> set[str]:
    """Names by a retired word that a source defines, its own included."""
    whole, parts = _of(name, NAMES), _of(name, PARTS)
    words = {*re.findall(r"\w+", source), Path(name).stem}
    suspect = {word for word in words if word in whole or not _parts(word).isdisjoint(parts)}
    # Most files have no such word, and need not be parsed to see whether it is defined there.
    return suspect & {*_defined(parsed(source)), Path(name).stem} if suspect else set()


def retired_phrases(name: str, text: str) -> set[str]:
    """Retired phrases in a text, in lower case."""
    words = " ".join(["", *text.lower().split()])
    # Looking behind at every letter would take much longer: re searches fast for what begins with one of a few letters.
    pattern = "|".join(rf"{phrase}(?![\w-])" for phrase in _of(name, PHRASES))
    return {m[0] for m in re.finditer(pattern, words) if not re.match(r"[\w-]", words[m.start() - 1])}


@cache
def _parts(name: str) -> frozenset[str]:
    return frozenset(part.lower() for part in _PART.findall(name))


def _of(name: str, words: Mapping[tuple[str, ...], dict[str, str]]) -> dict[str, str]:
    """Those words that are retired in a file."""
    tested = name.removeprefix("tests/")
    return {
        word: use
        for rooms, uses in words.items()
        if any(tested.startswith(room) for room in rooms)
        for word, use in uses.items()
    }


def _defined(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.arg | ast.keyword) and node.arg:
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr

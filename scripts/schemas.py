"""Write the JSON schemas of the files this project reads and writes: python scripts/schemas.py FOLDER."""

from __future__ import annotations

import argparse
import inspect
import sys
from pathlib import Path
from typing import Any

import msgspec

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from spec_decode.conformance.report import SCHEMA as REPORT
from spec_decode.conformance.report import ReportDocument
from spec_decode.matrix.answer import SCHEMA as ANSWER
from spec_decode.matrix.answer import Answer
from spec_decode.matrix.covered import SCHEMA as COVERED
from spec_decode.matrix.covered import Covered
from spec_decode.matrix.model import SCHEMA as MATRIX
from spec_decode.matrix.model import Matrix
from spec_decode.matrix.sources import AGREEMENT_SCHEMA, TIMING_SCHEMA, Agreement, TimingReport

_KINDS: dict[str, Any] = {
    REPORT: ReportDocument,
    MATRIX: Matrix,
    ANSWER: Answer,
    COVERED: Covered,
    AGREEMENT_SCHEMA: Agreement,
    TIMING_SCHEMA: TimingReport,
}


def schemas() -> dict[str, bytes]:
    """Return file name -> JSON Schema (2020-12) for each format; the name includes the version."""
    return {f"{name.replace('/', '-')}.json": _schema(name, kind) for name, kind in _KINDS.items()}


def _schema(name: str, kind: Any) -> bytes:
    found = msgspec.json.schema(kind)
    for definition in found["$defs"].values():
        # Only newer Pythons strip a docstring's indentation.
        definition["description"] = inspect.cleandoc(definition.get("description", ""))
    top = found["$defs"][found["$ref"].rpartition("/")[2]]
    top["properties"]["schema"] = {"const": name}
    top["required"] = list(dict.fromkeys(["schema", *top.get("required", [])]))
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": name}
    return msgspec.json.encode({**head, **found}) + b"\n"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder: Path = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    for file, content in schemas().items():
        (folder / file).write_bytes(content)

"""Reports of a GPU that the source has left behind: what they say was seen of other code than is here."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec

from spec_decode.conformance.report import ReportError, read_json
from spec_decode.matrix.sources import files_below
from spec_decode.source_digests import changed_since


class _Environment(msgspec.Struct):
    cuda: str | None


class _Provenance(msgspec.Struct):
    """What every kind of report has. sources: none in those of before they were recorded."""

    env: _Environment
    sources: dict[str, str] = {}


def out_of_date(paths: Iterable[Path]) -> dict[Path, str]:
    """Why a report of a GPU says nothing of the source as it is, for each below these paths of which that is so.

    Of every kind, those that the matrix does not show too. JSON that is no report is left out.
    """
    reasons = {path: _reason(path) for path in files_below(paths, ("*.json",))}
    return {path: reason for path, reason in reasons.items() if reason}


def _reason(path: Path) -> str:
    try:
        document = read_json(path)
        rows = document if isinstance(document, list) else [document]
        found = [row for row in msgspec.convert(rows, list[_Provenance]) if row.env.cuda is not None]
    except ReportError as error:
        return str(error)
    except msgspec.ValidationError:
        return ""
    if not all(row.sources for row in found):
        return "it does not say what source it covers"
    changed = dict.fromkeys(package for row in found for package in changed_since(row.sources))
    return f"{', '.join(changed)} changed since" if changed else ""

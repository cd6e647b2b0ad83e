"""Reports of a GPU that the source has left behind: what they say was seen of other code than is here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from spec_decode.conformance.report import ReportError
from spec_decode.matrix.sources import Documents
from spec_decode.source_digests import changed_since


class _Environment(msgspec.Struct):
    cuda: str | None


class _Provenance(msgspec.Struct):
    """What every kind of report has. sources: none in those of before they were recorded."""

    env: _Environment
    sources: dict[str, str] = {}


def out_of_date(documents: Documents) -> dict[Path, str]:
    """Why a report of a GPU says nothing of the source as it is, for each of these of which that is so.

    Of every kind, those that the matrix does not show too. JSON that is no report is left out.
    """
    reasons = {path: _reason(document) for path, document in documents.items()}
    return {path: reason for path, reason in reasons.items() if reason}


def _reason(document: Any) -> str:
    if isinstance(document, ReportError):
        return str(document)
    rows = document if isinstance(document, list) else [document]
    try:
        found = [row for row in msgspec.convert(rows, list[_Provenance]) if row.env.cuda is not None]
    except msgspec.ValidationError:
        return ""
    if not all(row.sources for row in found):
        return "it does not say what source it covers"
    changed = dict.fromkeys(package for row in found for package in changed_since(row.sources))
    return f"{', '.join(changed)} changed since" if changed else ""

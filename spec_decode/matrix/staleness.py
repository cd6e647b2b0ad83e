"""Reports that were made from other source than is here now."""

from __future__ import annotations

from pathlib import Path

import msgspec

from spec_decode.files import ReportError, require_unedited
from spec_decode.matrix.sources import Documents
from spec_decode.source_digests import SourceRecord


class _Provenance(msgspec.Struct):
    """What every kind of report has."""

    schema: str
    sources: SourceRecord = SourceRecord()


def stale_reports(documents: Documents) -> dict[Path, tuple[str, ...]]:
    """For each report that was made from other source, of any kind and device: the modules that changed since.

    JSON that is no report is left out. Raises ReportError for a file that cannot be read or was edited.
    """
    stale = {}
    for path, document in documents.items():
        if isinstance(document, ReportError):
            raise document
        require_unedited(document, str(path))
        try:
            changed = msgspec.convert(document, _Provenance).sources.changed()
        except msgspec.ValidationError:
            continue
        if changed:
            stale[path] = changed
    return stale

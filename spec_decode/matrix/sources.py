"""What the matrix is made from: check reports, the agreement of draft pairs, and timings, each by its schema, and
which of them are of older source."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec

from spec_decode.conformance.report import SCHEMA, Report
from spec_decode.environment import Environment
from spec_decode.files import ReportError, read_json, require_unedited
from spec_decode.source_digests import SourceRecord
from spec_decode.tools.timing_limit import TimingLimit

PATTERNS = ("check-*.json", "pair-agreement*.json", "bench-*.json")
"""Names of the files that a folder is searched for."""
Documents = dict[Path, Any]
"""What each JSON file holds, or the ReportError of why it cannot be read."""
AGREEMENT_SCHEMA = "attn-pair-agreement/5"
TIMING_SCHEMA = "attn-bench/3"


class AgreementRow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A draft model on a backend in a strategy: how many prompts got other tokens than by eager drafting, the same in
    each of the graph modes.

    unlike_plain: other text than plain decoding gives; None where sampling makes that no question. unlike_alone: other
    text or kept tokens than where the prompt has the engine to itself; None where it was not tried. accepted: tokens
    kept a round by eager drafting. Where the strategy was refused nothing was compared.
    """

    draft: str
    backend: str
    dtype: str
    batch_invariant: bool
    strategy: str
    graph_modes: tuple[str, ...]
    num_speculative_tokens: int
    temperature: float
    refusal: str
    prompts: int
    unlike_eager: int | None
    unlike_plain: int | None
    unlike_alone: int | None
    accepted: float | None

    @property
    def exact(self) -> bool:
        """Whether no rounding can excuse a text that differs from plain decoding's, or from the one alone."""
        return self.batch_invariant or self.dtype == "float32"

    @property
    def broken(self) -> bool:
        """Whether a text differs that must not."""
        return bool(self.unlike_eager or (self.exact and (self.unlike_plain or self.unlike_alone)))


class Agreement(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A report of draft pairs. digest: of everything else."""

    schema: str = AGREEMENT_SCHEMA
    env: Environment
    command: str
    sources: SourceRecord = SourceRecord()
    rows: tuple[AgreementRow, ...]
    digest: str = ""


class Quantiles(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Microseconds; in a file [p20, p50, p80]."""

    p20: float
    p50: float
    p80: float


class TimingEnvironment(Environment, frozen=True, kw_only=True):
    """Where a timing was taken, and what its copies and its large products reached."""

    copy_bytes_per_us: float | None = None
    matmul_flops_per_us: float | None = None
    """Absent from reports of before it was measured."""
    kernel_interval_us: float | None = None
    """From one kernel of a graph to the next, where each does next to nothing."""

    @property
    def plain(self) -> Environment:
        return Environment(**{name: getattr(self, name) for name in Environment.__struct_fields__})


class TimingRow(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A row of `attn-backends bench`. A case may add columns of its own, which are not read here."""

    case: str
    backend: str
    peer: bool = False
    """Whether this is another project's own kernel."""
    spec: str | None = None
    num_groups: int | None = None
    """KV groups that one launch advances, where their number is what is compared."""
    strategy: str | None = None
    num_tokens: int | None = None
    """Query tokens of each request, where their number is what is compared."""
    tree: bool | None = None
    """Whether these are a tree, where that is compared with as many in a row."""
    num_reqs: int
    num_speculative_tokens: int | None = None
    context: int | None = None
    host_us: Quantiles | None = None
    gpu_us: Quantiles | None = None
    wall_us: Quantiles | None = None
    kernels_per_step: float | None = None
    floor_us: float | None = None
    floor_counts: int | None = None
    limits: tuple[TimingLimit, ...] = ()
    draft: str | None = None
    """Of a whole engine: what drafts."""
    accepted: Annotated[float, msgspec.Meta(ge=0)] | None = None
    """Of a whole engine: draft tokens kept a round."""
    per_user: float | None = None
    """Of a whole engine: output tokens a second of one request."""
    temperature: float | None = None
    """Of a draft round: the requests'; 0 is greedy."""
    extend_in_graph: bool | None = None
    one_graph: bool | None = None
    host_waits: bool | None = None
    batch_invariant: bool = False

    @property
    def token_us(self) -> Quantiles | None:
        """Of a whole engine: the time of a round over the tokens that it brings a request."""
        if self.per_user is None or self.wall_us is None:
            return None
        tokens, us = 1 + (self.accepted or 0.0), self.wall_us
        return Quantiles(p20=us.p20 / tokens, p50=us.p50 / tokens, p80=us.p80 / tokens)


class TimingReport(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A report of `attn-backends bench`. missing: what could not be timed, and why. sources: the modules behind it, a
    part for each case that was asked for. floor_counts: what floors count; a row has the index of its own. digest: of
    everything else.
    """

    schema: str = TIMING_SCHEMA
    env: TimingEnvironment
    command: str
    sources: SourceRecord = SourceRecord()
    missing: tuple[str, ...] = ()
    floor_counts: tuple[str, ...] = ()
    rows: tuple[TimingRow, ...]
    digest: str = ""


class Timing(TimingRow, frozen=True, kw_only=True):
    """A row with what its report says of all rows. changed: the modules behind it that are not what they were."""

    env: TimingEnvironment
    command: str
    changed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Sources:
    """Everything that was read."""

    reports: list[Report] = field(default_factory=list)
    agreements: list[Agreement] = field(default_factory=list)
    timings: list[Timing] = field(default_factory=list)

    @classmethod
    def read(cls, paths: Iterable[Path]) -> Sources:
        """The files of these paths; a folder stands for those below it that are named like evidence. Raises as `of`."""
        return cls.of(read_documents(files_below(paths)))

    @classmethod
    def of(cls, documents: Documents) -> Sources:
        """Raises ReportError for a file that cannot be read, and one that follows none of the known schemas."""
        sources = cls()
        for path, document in documents.items():
            if isinstance(document, ReportError):
                raise document
            sources._add(document, str(path))
        return sources

    def _add(self, document: Any, where: str) -> None:
        schema = _schema(document)
        if schema == AGREEMENT_SCHEMA:
            self.agreements.append(_follow(document, Agreement, where))
        elif schema == TIMING_SCHEMA:
            self.timings.extend(_timings(_follow(document, TimingReport, where)))
        elif schema == SCHEMA:
            self.reports.append(Report.of(document, where))
        else:
            raise ReportError(
                f"{where} has schema {schema or None!r}, the matrix reads {SCHEMA}, {AGREEMENT_SCHEMA} and "
                f"{TIMING_SCHEMA}. Make it again, leave it out, or read it with the version that wrote it."
            )
        require_unedited(document, where)


def read_documents(files: Iterable[Path]) -> Documents:
    """Each file's document, read once."""

    def read(file: Path) -> Any:
        try:
            return read_json(file)
        except ReportError as error:
            return error

    return {file: read(file) for file in files}


def files_below(paths: Iterable[Path], patterns: Sequence[str] = PATTERNS) -> list[Path]:
    """The files that the paths name; a folder stands for those below it that match one of the patterns."""
    found: list[Path] = []
    for path in paths:
        below = (file for pattern in patterns for file in sorted(path.rglob(pattern)) if not file.is_dir())
        found += below if path.is_dir() else [path]
    return list(dict.fromkeys(found))


def _schema(document: Any) -> str:
    schema = document.get("schema") if isinstance(document, dict) else None
    return schema if isinstance(schema, str) else ""


def _timings(report: TimingReport) -> list[Timing]:
    changed: dict[str, tuple[str, ...]] = {}

    def changed_behind(case: str) -> tuple[str, ...]:
        part = next((name for name in report.sources.parts if case == name or case.startswith(f"{name}/")), "")
        if part not in changed:
            changed[part] = report.sources.changed([part] if part else ())
        return changed[part]

    return [
        Timing(
            **{name: getattr(row, name) for name in TimingRow.__struct_fields__},
            env=report.env,
            command=report.command,
            changed=changed_behind(row.case),
        )
        for row in report.rows
    ]


def _follow(document: Any, kind: Any, where: str) -> Any:
    try:
        return msgspec.convert(document, kind)
    except msgspec.ValidationError as error:
        raise ReportError(
            f"{where} does not follow the schema that it names: {error}. Run the command that made it again."
        ) from error


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

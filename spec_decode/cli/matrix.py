"""`attn-backends matrix`: the compatibility matrix, from reports or from a fresh run."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import click

from spec_decode.cli.options import device_option, options_as, resolve_device
from spec_decode.cli.output import UserError, did_you_mean, require_writable, say, stdout, write
from spec_decode.testing.interpreter import interpret_kernels_on

if TYPE_CHECKING:
    from spec_decode.conformance.report import Report
    from spec_decode.matrix import Matrix, Sources
    from spec_decode.matrix.sources import Documents

REPORTS = Path("reports")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Options:
    """The options of `matrix`, as the user gave them."""

    paths: Annotated[
        tuple[Path, ...], click.argument("paths", nargs=-1, metavar="[PATH...]", type=click.Path(path_type=Path))
    ]
    spec: Annotated[
        str | None,
        "Say which backends serve this attention, and which checks came nearest to it: 'window 4096, heads 32/4, dim "
        "128, page 16, bf16, full loop'. With --device, only on devices of this name, such as H100.",
    ]
    backend: Annotated[
        str | None, "Show what the passed checks of this backend covered together. --device is as for --spec."
    ]
    names: Annotated[tuple[str, ...], "--run", "Check this backend now and show the result; repeatable."]
    device: Annotated[str | None, device_option]
    tags: Annotated[tuple[str, ...], "--tag", "Show only columns that match this pattern; repeatable."]
    into: Annotated[Path | None, "Save the reports of --run in this folder."]
    resume: Annotated[bool, "Skip what an interrupted --run --into has finished."] = False
    check_limit: Annotated[float, "Time limit of one check, in seconds."] = 600.0
    limit: Annotated[float, "Time limit of one backend, in seconds."] = 7200.0
    html: Annotated[str | None, "Write one self-contained page to a file, or - for standard output."]
    as_json: Annotated[str | None, "--json", "Write JSON to a file, or - for standard output."]
    installed: Annotated[bool, "Mark rows of versions that are not installed here as stale."] = False
    only_check: Annotated[bool, "--check", "Write nothing, and fail for a wrong report or page."] = False
    strict: Annotated[bool, "With --check, also fail for reports of older source."] = False

    def targets(self) -> dict[str, str | None]:
        """Return the output path of each format."""
        return {"html": self.html, "json": self.as_json}

    def _require_alone(self, flag: str, forms: Sequence[str]) -> None:
        """Raise UserError if a question is asked together with options of the whole matrix."""
        given: dict[str, object] = {"--spec": self.spec is not None, "--backend": self.backend is not None}
        if not given[flag]:
            return
        given |= {"--run": self.names, "--tag": self.tags, "--installed": self.installed, "--check": self.only_check}
        if clash := [other for other, value in given.items() if value and other != flag]:
            raise UserError(f"{flag} reads existing reports and shows no columns, got {clash[0]} too. Drop {clash[0]}.")
        if form := next((form for form, target in self.targets().items() if target and form not in forms), None):
            others = " or ".join(f"--{each}" for each in forms)
            raise UserError(f"{flag} has no form for --{form}. Use {others}, or omit all for text.")

    def require_consistent(self) -> None:
        """Raise UserError for options that contradict one another."""
        for flag, forms in {"--spec": ("html", "json"), "--backend": ("json",)}.items():
            self._require_alone(flag, forms)
        if (self.into or self.resume) and not self.names:
            raise UserError("--into and --resume require --run. Name backends.")
        if self.strict and not self.only_check:
            raise UserError("--strict requires --check. Add it.")
        if self.resume and not self.into:
            raise UserError("--resume requires --into. Name the folder of the interrupted run.")
        if self.names and self.only_check:
            raise UserError(
                "--check reads existing reports, got --run too. Run with --into first, then check that folder."
            )
        if self.only_check and (form := next((form for form, target in self.targets().items() if target), None)):
            raise UserError(f"--check writes nothing, got --{form} too. Drop --{form}.")
        if len(piped := [f"--{form}" for form, target in self.targets().items() if target == "-"]) > 1:
            raise UserError(f"{' and '.join(piped)} are all -, but stdout takes one. Write the others to files.")
        if not (self.check_limit > 0 and self.limit > 0):
            raise UserError(
                f"a limit must be a positive number of seconds, got {self.check_limit:g} and {self.limit:g}. Raise "
                "--check-limit or --limit."
            )


@click.command()
@options_as(_Options)
def matrix(options: _Options) -> None:
    """Show what each backend claims next to what was observed.

    PATH is a report of checks, draft pairs or timings, or a folder of them. Without PATH and --run, the matrix shows
    reports/. --run checks a backend (or `available`, or `all`) in a subprocess: if one crashes or hangs, it is named
    and the others still run.

    --check fails for a report that cannot be read, was edited or has another schema, and for a page that cannot be
    made. Reports made from different source are a warning; with --strict they fail too.

    --spec answers one question instead: for each backend whether it accepts this attention, and the nearest checks that
    passed, with the axes in which they differ, their device and date. --backend shows for each column of one backend
    which dtypes, pages, dims, groups, windows and batches its passed checks had.
    """
    options.require_consistent()
    from spec_decode.matrix import build_matrix

    # A fresh run is shown without older reports.
    paths = options.paths or (() if options.names else (REPORTS,))
    sources, documents = _read(paths)
    if options.spec is not None:
        from spec_decode.cli.matrix_spec import answer_spec

        answer_spec(options.spec, sources.reports, options.device or "", options.targets())
        return
    if options.backend is not None:
        from spec_decode.cli.matrix_spec import show_covered

        show_covered(options.backend, sources.reports, options.device or "", options.targets())
        return
    fresh = _run(options) if options.names else []
    sources.reports.extend(fresh)
    _require_columns(options.tags, sources.reports)
    result = build_matrix(
        sources.reports,
        sources.agreements,
        sources.timings,
        tags=options.tags,
        current=_installed(sources) if options.installed else None,
    )
    if options.only_check:
        _check(result, documents, options)
        return
    _show(result, options)
    if "-" not in options.targets().values():
        _warn_of_age(documents)
    if not all(report.ok for report in fresh):
        raise SystemExit(1)


def _require_columns(patterns: tuple[str, ...], reports: Sequence[Report]) -> None:
    from spec_decode.matrix.model import tags_of

    known = tags_of(reports)
    for pattern in patterns:
        if not any(fnmatch(tag, pattern) for tag in known):
            raise UserError(
                f"--tag must match a column of these reports, but {pattern!r} matches none. Fix --tag."
                f"{did_you_mean(pattern.strip('*'), known)}"
            )


def _read(paths: tuple[Path, ...]) -> tuple[Sources, Documents]:
    """Read the sources of the matrix, and all JSON below the paths. Paths without any are an error."""
    from spec_decode.matrix import Sources
    from spec_decode.matrix.sources import PATTERNS, files_below, read_documents

    there = [path for path in paths if path != REPORTS or path.exists()]
    shown = files_below(there)
    if absent := [path for path in there if not os.path.exists(path)]:  # unlike Path.exists, it never raises
        raise UserError(f"{absent[0]} does not exist. Pass a report, or a folder of reports.")
    if paths and not shown:
        raise UserError(
            f"a matrix needs reports, found no {' or '.join(PATTERNS)} below {', '.join(map(str, paths))}. "
            "Name reports, or use --run available for fresh ones."
        )
    documents = read_documents(files_below(there, ("*.json",)))
    return Sources.of({path: documents[path] for path in shown}), documents


def _run(options: _Options) -> list[Report]:
    """Check each named backend now and return the reports."""
    for target in options.targets().values():
        require_writable(target)
    device = resolve_device(options.device)
    interpret_kernels_on(device)
    from spec_decode.cli.matrix_run import MatrixRun
    from spec_decode.conformance.subprocess_runner import TimeLimits

    limits = TimeLimits(check=options.check_limit, backend=options.limit)
    run = MatrixRun(device=device, tags=options.tags, into=options.into, resume=options.resume, limits=limits)
    return run.of(options.names)


def _installed(sources: Sources) -> dict[str, str]:
    """Return the versions of the backends that load here."""
    from attn_backends import BackendError, registry

    found = {}
    for name in {report.backend for report in sources.reports}:
        try:
            found[name] = str(registry.load(name).version)
        except BackendError:
            continue
    return found


def _writers() -> dict[str, Callable[[Matrix], str]]:
    from spec_decode.matrix import to_html, to_json

    return {"html": to_html, "json": lambda matrix: to_json(matrix).decode()}


def _show(result: Matrix, options: _Options) -> None:
    from spec_decode.matrix import to_table

    targets = options.targets()
    if not any(targets.values()):
        stdout().print(to_table(result))
    for name, render in _writers().items():
        if (target := targets[name]) is not None:
            write(target, render(result))
            if "-" not in targets.values():
                say(stdout(), f"wrote {target}")


def _check(result: Matrix, documents: Documents, options: _Options) -> None:
    """Render every page; if strict, raise SystemExit for reports from older source."""
    for render in _writers().values():
        render(result)
    if _warn_of_age(documents) and options.strict:
        raise SystemExit(1)
    say(stdout(), f"{len(documents)} reports are intact and unedited")


def _warn_of_age(documents: Documents) -> bool:
    """Name the reports made from different source; return whether there are any."""
    from spec_decode.matrix.sources import stale_reports
    from spec_decode.matrix.text import age_text

    stale = stale_reports(documents)
    for path, changed in stale.items():
        say(stdout(), f"{path}: {age_text(changed)}")
    if stale:
        say(
            stdout(),
            f"warning: {len(stale)} of {len(documents)} reports are from older source; python "
            "scripts/evidence.py --stale renews them on a GPU",
        )
    return bool(stale)

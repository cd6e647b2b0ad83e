"""`attn-backends matrix`: the compatibility matrix, from reports or from a fresh run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import click

from spec_decode.cli.interpreter import interpret_kernels_on
from spec_decode.cli.options import device_option, options_as, resolve_device
from spec_decode.cli.output import UserError, say, stdout, write

if TYPE_CHECKING:
    from spec_decode.conformance.report import Report
    from spec_decode.matrix import Matrix, Sources
    from spec_decode.matrix.sources import Documents

REPORTS = Path("reports")
PUBLISHED = {"markdown": "docs/compatibility.md", "html": "docs/compatibility.html"}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Options:
    """The options of `matrix`, as the user gave them."""

    paths: Annotated[
        tuple[Path, ...], click.argument("paths", nargs=-1, metavar="[PATH...]", type=click.Path(path_type=Path))
    ]
    names: Annotated[tuple[str, ...], "--run", "Check this backend afresh and show it; repeatable."]
    device: Annotated[str | None, device_option]
    tags: Annotated[tuple[str, ...], "--tag", "Only columns like this pattern; repeatable."]
    into: Annotated[Path | None, "Keep the reports of --run in a folder."]
    resume: Annotated[bool, "Do not check again what an interrupted --run --into has finished."] = False
    check_limit: Annotated[float, "Seconds that one check runs at most."] = 600.0
    limit: Annotated[float, "Seconds that one backend runs at most."] = 7200.0
    markdown: Annotated[str | None, "Write Markdown to a file, or - for standard output."]
    html: Annotated[str | None, "Write one self-contained page to a file, or - for standard output."]
    as_json: Annotated[str | None, "--json", "Write JSON to a file, or - for standard output."]
    installed: Annotated[bool, "Mark rows of other versions than those installed here as stale."] = False
    only_check: Annotated[bool, "--check", "Write nothing; fail for a report that is wrong."] = False
    strict: Annotated[bool, "With --check, fail for a report of older source too."] = False

    def targets(self) -> dict[str, str | None]:
        """Where each format goes; with --check alone, the published pages."""
        named = {"markdown": self.markdown, "html": self.html, "json": self.as_json}
        return {**named, **PUBLISHED} if self.only_check and not any(named.values()) else named

    def require_sense(self) -> None:
        """Raise UserError for options that contradict one another."""
        if (self.into or self.resume) and not self.names:
            raise UserError("--into and --resume are about a run, no --run was given; nothing was done. Name backends.")
        if self.strict and not self.only_check:
            raise UserError("--strict is about --check, which is missing. Add it.")
        if self.resume and not self.into:
            raise UserError(
                "--resume needs the folder of the interrupted run, got no --into; nothing was run. Name it."
            )
        if self.names and self.only_check:
            raise UserError("--check compares pages with kept reports, got --run too; nothing was run. Use one.")
        if not (self.check_limit > 0 and self.limit > 0):
            raise UserError(
                f"a limit must be a positive number of seconds, got {self.check_limit:g} and {self.limit:g}; nothing "
                "was run. Fix it."
            )


@click.command()
@options_as(_Options)
def matrix(options: _Options) -> None:
    """Show what each backend claims and was seen to do.

    PATH is a report of checks, draft pairs or timings; a folder stands for those below it. Without a PATH and without
    --run, reports/ is shown. With --run each backend, or `available`, or `all`, is checked in a subprocess: one that
    crashes or hangs is named, and costs no other its results. --check compares the pages named, or else
    docs/compatibility.md and .html, with what the reports say now, and warns of GPU reports that were made from other
    source than is here now; with --strict it fails for them.
    """
    options.require_sense()
    from spec_decode.matrix import build_matrix

    # A fresh run is shown by itself.
    paths = options.paths or (() if options.names else (REPORTS,))
    sources, documents = _read(paths)
    fresh = _run(options) if options.names else []
    sources.reports.extend(fresh)
    result = build_matrix(
        sources.reports,
        sources.agreements,
        sources.timings,
        tags=options.tags,
        current=_installed(sources) if options.installed else None,
    )
    if options.only_check:
        # Both are asked, so that one run names all that is to be made again.
        current = _up_to_date(documents) or not options.strict
        if not all([_published(result, options.targets(), paths), current]):
            raise SystemExit(1)
        return
    _show(result, options.targets())
    if "-" not in options.targets().values():
        _up_to_date(documents)
    if not all(report.ok for report in fresh):
        raise SystemExit(1)


def _read(paths: tuple[Path, ...]) -> tuple[Sources, Documents]:
    """What the matrix is made from, and all JSON below the paths. Paths that hold nothing are an error."""
    from spec_decode.matrix import Sources
    from spec_decode.matrix.sources import PATTERNS, files_below, read_documents

    there = [path for path in paths if path != REPORTS or path.exists()]
    shown = files_below(there)
    if paths and not shown:
        raise UserError(
            f"a matrix needs reports, found no {' or '.join(PATTERNS)} below {', '.join(map(str, paths))}; nothing was "
            "shown. Name reports, or use --run available for fresh ones."
        )
    documents = read_documents(files_below(there, ("*.json",)))
    return Sources.of({path: documents[path] for path in shown}), documents


def _run(options: _Options) -> list[Report]:
    """The reports of a fresh check of each backend named."""
    device = resolve_device(options.device)
    interpret_kernels_on(device)
    from spec_decode.cli.matrix_run import MatrixRun
    from spec_decode.conformance.subprocess_runner import TimeLimits

    limits = TimeLimits(check=options.check_limit, backend=options.limit)
    run = MatrixRun(device=device, tags=options.tags, into=options.into, resume=options.resume, limits=limits)
    return run.of(options.names)


def _installed(sources: Sources) -> dict[str, str]:
    """The versions of the backends that load here."""
    from attn_backends import BackendError, registry

    found = {}
    for name in {report.backend for report in sources.reports}:
        try:
            found[name] = str(registry.get(name).version)
        except BackendError:
            continue
    return found


def _writers() -> dict[str, Callable[[Matrix], str]]:
    from spec_decode.matrix import to_html, to_json, to_markdown

    return {"markdown": to_markdown, "html": to_html, "json": lambda matrix: to_json(matrix).decode()}


def _show(result: Matrix, targets: dict[str, str | None]) -> None:
    from spec_decode.matrix import to_table

    if not any(targets.values()):
        stdout().print(to_table(result))
    for name, render in _writers().items():
        if (target := targets[name]) is not None:
            write(target, render(result))
            if "-" not in targets.values():
                say(stdout(), f"wrote {target}")


def _published(result: Matrix, targets: dict[str, str | None], paths: tuple[Path, ...]) -> bool:
    """Whether each target is what would be written, said in a line."""
    writers = _writers()
    drifted = {}
    for name, target in targets.items():
        if target is None:
            continue
        found = Path(target).read_text(encoding="utf-8") if Path(target).is_file() else None
        if found != writers[name](result):
            drifted[name] = target
    if drifted:
        renew = " ".join(["attn-backends matrix", *map(str, paths), *(f"--{n} {t}" for n, t in drifted.items())])
        click.echo(f"{', '.join(drifted.values())} must say what the reports say, and do not. Renew with: {renew}")
        return False
    say(stdout(), f"{', '.join(filter(None, targets.values()))}: what the reports say")
    return True


def _up_to_date(documents: Documents) -> bool:
    """Whether the reports of a GPU are of the source as it is; names those that are not."""
    from spec_decode.matrix.staleness import out_of_date

    reasons = out_of_date(documents)
    for path, reason in reasons.items():
        say(stdout(), f"out of date: {path}: {reason}")
    if reasons:
        say(
            stdout(),
            f"warning: {len(reasons)} GPU reports were made from other source than is here now. Run their commands "
            "again.",
        )
    return not reasons

"""`attn-backends check`: the conformance checks of one or more backends."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console

from spec_decode.cli.common import (
    UserError,
    chosen_names,
    device_option,
    interpret_kernels_on,
    resolve_device,
    say,
    stdout,
    writing,
)

if TYPE_CHECKING:
    import torch

    from spec_decode.conformance.report import Report, Result


@click.command()
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
@device_option
@click.option("--family", "families", multiple=True, help="Only this family of checks; repeatable.")
@click.option("--only", "checks", multiple=True, metavar="PATTERN", help="Only checks like this; repeatable.")
@click.option("--json", "target", metavar="PATH", help="Report file; a folder gets one check-NAME.json each.")
@click.option("--verbose", is_flag=True, help="Print what is unsupported, too, each with its reason.")
@click.option("--apart", is_flag=True, help="Run in a process of its own, as several backends do.")
def check(
    names: tuple[str, ...],
    device: str | None,
    families: tuple[str, ...],
    checks: tuple[str, ...],
    target: str | None,
    verbose: bool,
    apart: bool,
) -> None:
    """Check backends against the contract.

    NAME is a registered backend, `available` (each made for the device) or `all`. Each failure comes with its
    reason and the command that repeats it; a check that is newer than the contract a
    backend was built for is a preview, and fails nobody. Under the summary stands what no result says: an
    advance that was not tried, or a known failure that covers nothing. On the CPU, Triton's kernels run in its
    interpreter. The exit status is 0 only if every backend passes, and a backend for which nothing ran does not.

    Of several, each runs in a process of its own: one that crashes, or hangs for ten minutes in a check, costs no
    other its results. One alone runs in this process, where a debugger finds it.
    """
    where = resolve_device(device)
    interpret_kernels_on(where)
    if "available" in names:
        _tell_refused()
    chosen = chosen_names(names, where)
    if not chosen:
        raise UserError(f"a check needs a backend, none is available on {where}; nothing was run. Name one.")
    _require_known(families)
    ways = _ways(chosen, apart)
    paths = _report_paths(target, chosen)
    console = stdout()
    passed = [
        _check_and_save(console, run, name, where, families, checks, paths.get(name), verbose)
        for name, run in ways.items()
    ]
    if not all(passed):
        raise SystemExit(1)


def run_checks(
    console: Console,
    name: str,
    device: torch.device,
    families: Sequence[str] = (),
    checks: Sequence[str] = (),
    *,
    verbose: bool = False,
    on_note: Callable[[str], None] | None = None,
) -> Report:
    """One backend's report, each failure printed as it happens, and each refusal if verbose.

    on_note: as in `check_backend`.
    """
    from spec_decode.conformance import check_backend

    command = _command(name, device, families, checks)
    with console.status(f"{name}: starting") as status:
        return check_backend(
            name,
            device=device,
            families=families or None,
            checks=checks or None,
            command=command,
            on_result=_printer(console, name, status.update, verbose),
            on_note=on_note,
        )


def run_checks_apart(
    console: Console,
    name: str,
    device: torch.device,
    families: Sequence[str] = (),
    checks: Sequence[str] = (),
    *,
    verbose: bool = False,
    on_note: Callable[[str], None] | None = None,
) -> Report:
    """As `run_checks`, in a process of its own, within the limits of `spec_decode.conformance.isolation`."""
    from spec_decode.conformance.isolation import check_apart
    from spec_decode.conformance.report import environment

    command = _command(name, device, families, checks)
    ask = {"device": str(device), "families": list(families), "checks": list(checks), "command": command}
    with console.status(f"{name}: starting") as status:
        return check_apart(
            name,
            env=environment(device),
            ask=ask,
            on_result=_printer(console, name, status.update, verbose),
            on_note=on_note,
        )


def _ways(names: Sequence[str], apart: bool) -> dict[str, Callable[..., Report]]:
    """How to run each backend. What a call has registered here no other process has."""
    from attn_backends import registry

    ours = [name for name in names if registry.registered_here(name)]
    if apart and ours:
        raise UserError(
            f"--apart needs backends that another process has too, {', '.join(ours)} were registered by a call in this "
            "one; nothing was run. Leave --apart out, or declare them as entry points."
        )
    apart = apart or len(names) > 1
    return {name: run_checks_apart if apart and name not in ours else run_checks for name in names}


def _tell_refused() -> None:
    """Try the plug-ins before `available` loads them, and name those that cannot be."""
    from spec_decode.tools.plug_ins import try_plug_ins

    for why in try_plug_ins().values():
        click.echo(f"not available: {' '.join(why.split())}", err=True)


def _check_and_save(
    console: Console,
    run: Callable[..., Report],
    name: str,
    device: torch.device,
    families: Sequence[str],
    checks: Sequence[str],
    path: Path | None,
    verbose: bool,
) -> bool:
    from attn_backends import BrokenBackend

    notes: list[str] = []
    try:
        report = run(console, name, device, families, checks, verbose=verbose, on_note=notes.append)
    except BrokenBackend as error:
        # One of `all` that does not load must not cost the others their checks.
        click.echo(f"error: {' '.join(str(error).split())}", err=True)
        return False
    except KeyboardInterrupt:
        click.echo(f"interrupted in {name}: no report of it was written", err=True)
        raise SystemExit(130) from None
    say(console, report.summary(), "green" if report.ok else "bold red")
    for note in notes:
        say(console, f"    {note}", "yellow")
    if path is not None:
        with writing(path):
            report.save(path)
        say(console, f"wrote {path}")
    return report.ok


def _printer(console: Console, name: str, update: Callable[[str], None], verbose: bool) -> Callable[[Result], None]:
    from spec_decode.conformance.report import FAILURES, Outcome

    styles = {
        **dict.fromkeys((*FAILURES, Outcome.NOT_RUN), "red"),
        **dict.fromkeys((Outcome.PREVIEW, Outcome.UNAVAILABLE), "yellow"),
        **({Outcome.UNSUPPORTED: "dim"} if verbose else {}),
    }
    seen = {"checks": 0, "failures": 0}

    def on_result(result: Result) -> None:
        seen["checks"] += 1
        if style := styles.get(result.outcome):
            say(console, f"{result.outcome.value}: {result.check}[{result.case}]: {result.reason}", style)
        if result.outcome in FAILURES | {Outcome.NOT_RUN}:
            seen["failures"] += 1
            say(console, f"    {result.repro}")
        # An opening bracket would begin rich markup; the case is left out for that reason too.
        update(f"{name}: {seen['checks']} checks, {seen['failures']} failed; last {result.check}")

    return on_result


def _command(name: str, device: torch.device, families: Sequence[str], checks: Sequence[str]) -> str:
    words = ["attn-backends", "check", name, "--device", str(device)]
    words += [word for family in families for word in ("--family", family)]
    words += [word for pattern in checks for word in ("--only", pattern)]
    return shlex.join(words)


def _require_known(families: Sequence[str]) -> None:
    from spec_decode.conformance.report import FAMILIES

    if strangers := sorted(set(families) - set(FAMILIES)):
        raise UserError(
            f"a family must be one of {', '.join(FAMILIES)}, got {', '.join(strangers)}; nothing was run. Fix --family."
        )


def _report_paths(target: str | None, names: Sequence[str]) -> dict[str, Path]:
    """Where each report goes; made before anything runs, so that a bad path does not cost a run."""
    if target is None:
        return {}
    path = Path(target)
    if path.suffix != ".json" or path.is_dir() or target.endswith("/"):
        paths = {name: path / f"check-{name}.json" for name in names}
    elif len(names) == 1:
        paths = {names[0]: path}
    else:
        raise UserError(
            f"several reports need a folder, --json names the file {path} for {', '.join(names)}; nothing "
            "was run. Name a folder."
        )
    with writing(next(iter(paths.values()))):
        return paths

"""`attn-backends check`: the conformance checks of one or more backends."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import click
from rich.console import Console

from spec_decode.cli.checkout import builder_names, kit_of
from spec_decode.cli.options import (
    chosen_names,
    device_option,
    options_as,
    resolve_device,
    try_plug_ins_aloud,
    use_threads,
)
from spec_decode.cli.output import (
    UserError,
    complain,
    did_you_mean,
    exit_status,
    progress,
    require_writable,
    say,
    stdout,
    write,
)
from spec_decode.testing.interpreter import interpret_kernels_on

if TYPE_CHECKING:
    import torch

    from spec_decode.conformance.kept_results import KeptResults
    from spec_decode.conformance.report import Report, Result
    from spec_decode.testing.subject import Subject


@dataclass(frozen=True, slots=True)
class CheckRun:
    """Which checks run on which device, and whether rejections are printed too.

    engine: owner of the builders to check; empty for backends. soak: rounds and seed, if soaks were requested. seed: of
    the drawn cases. again: raises an interrupt that was swallowed.
    """

    console: Console
    device: torch.device
    families: Sequence[str] = ()
    checks: Sequence[str] = ()
    verbose: bool = False
    quick: bool = False
    engine: str = ""
    soak: dict[str, int] = field(default_factory=dict)
    seed: int = 0
    again: Callable[[], None] = lambda: None

    def of(
        self,
        name: str,
        *,
        isolated: bool = False,
        kept: KeptResults | None = None,
        on_note: Callable[[str], None] | None = None,
    ) -> Report:
        """Check one backend and return its report; each failure is printed as it happens.

        isolated: in a separate process, within the limits of `spec_decode.conformance.subprocess_runner`. kept: as in
        `spec_decode.conformance.runner.run`. on_note: as in `check_backend`.
        """
        request: dict[str, Any] = {"families": list(self.families), "checks": list(self.checks), "quick": self.quick}
        request["command"] = self._command(name)
        with progress(self.console, f"{name}: starting") as update:
            on_result = self._printer(name, update)
            if isolated:
                from spec_decode.conformance.subprocess_runner import check_isolated
                from spec_decode.environment import environment

                keep = {"keep": {"report": str(kept.report), "resume": kept.resume}} if kept else {}
                request |= {"device": str(self.device), "soak": self.soak, "seed": self.seed, **keep}
                env = environment(self.device)
                return check_isolated(name, env=env, request=request, on_result=on_result, on_note=on_note)
            from builders.kernels.triton_runtime import torch_implementations
            from spec_decode.conformance.drawn_cases import drawn_from
            from spec_decode.conformance.runner import check_list, run
            from spec_decode.conformance.soak_checks import soak_length

            # The interpreter is then only for the engine's kernels; this library's kernels have their own checks.
            kernels = torch_implementations() if self.engine else nullcontext()
            with kernels, soak_length(**self.soak), drawn_from(self.seed):
                listed = check_list(self._subject(name), device=self.device, **request)
                return run(listed, on_result=on_result, on_note=on_note, kept=kept)

    def _subject(self, name: str) -> str | Subject:
        return kit_of(self.engine).subjects([name])[0] if self.engine else name

    def _command(self, name: str) -> str:
        options = ["--device", str(self.device)]
        options += [part for family in self.families for part in ("--family", family)]
        options += [part for name, number in self.soak.items() for part in (f"--{name}", str(number))]
        options += ["--seed", str(self.seed)] if self.seed and not self.soak else []
        options += [part for pattern in self.checks for part in ("--only", pattern)]
        options += ["--quick"] * self.quick
        engine = ["--engine", self.engine] if self.engine else []
        return shlex.join(["attn-backends", "check", *engine, name, *options])

    def _printer(self, name: str, update: Callable[[str], None]) -> Callable[[Result], None]:
        from spec_decode.conformance.report import FAILURES, repro_command
        from spec_decode.testing.outcome import Outcome

        repro = partial(repro_command, name, engine=self.engine, device=self.device.type)
        bad = FAILURES | {Outcome.NOT_RUN}
        styles = {
            **dict.fromkeys(bad, "red"),
            **dict.fromkeys((Outcome.XFAIL, Outcome.PREVIEW, Outcome.UNAVAILABLE), "yellow"),
            **({Outcome.UNSUPPORTED: "dim"} if self.verbose else {}),
        }
        count = count_results(name, update)

        def on_result(result: Result) -> None:
            self.again()
            if style := styles.get(result.outcome):
                say(self.console, f"{result.outcome.value}: {result.check}[{result.case}]: {result.reason}", style)
            if result.outcome in bad:
                say(self.console, f"    {repro(result.check, result.case)}")
            count(result)

        return on_result


def count_results(title: str, update: Callable[[str], None]) -> Callable[[Result], None]:
    """Return a callback that shows the number of results with `update`."""
    from spec_decode.conformance.report import FAILURES
    from spec_decode.testing.outcome import Outcome

    seen: Counter[bool] = Counter()

    def on_result(result: Result) -> None:
        seen[result.outcome in FAILURES | {Outcome.NOT_RUN}] += 1
        update(f"{title}: {seen.total()} checks, {seen[True]} failed; last {result.check}")

    return on_result


isolate_option = click.option(
    "--isolate/--no-isolate",
    default=None,
    help="Run each backend in a subprocess (the default), or all in this process, for a debugger.",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Options:
    """The options of `check`, as the user gave them."""

    names: Annotated[tuple[str, ...], click.argument("names", nargs=-1, metavar="[NAME...]")]
    engine: Annotated[str | None, "Check metadata builders of an engine: vllm or sglang. Without NAME, all."]
    device: Annotated[str | None, device_option]
    families: Annotated[tuple[str, ...], "--family", "Run only this family of checks; repeatable."]
    checks: Annotated[tuple[str, ...], "--only", "Run only checks that match this pattern; repeatable."]
    target: Annotated[str | None, "--json", "Report file, or a folder for one check-NAME.json each."]
    verbose: Annotated[bool, "Also print unsupported cases, with reasons."] = False
    isolate: Annotated[bool | None, isolate_option]
    threads: Annotated[int, click.IntRange(min=1), "Torch threads; more rarely help."] = 1
    quick: Annotated[bool, "Run one case of each check, and of each spec: seconds instead of minutes."] = False
    rounds: Annotated[int | None, click.IntRange(min=10), "Rounds of a soak in each strategy; default 5,000."] = None
    seed: Annotated[int | None, click.IntRange(0, 2**62), "Seed of the drawn cases and of a soak; default 0."] = None
    strict_claims: Annotated[bool, "Fail too if no passed check covers a column that the backend claims."] = False
    resume: Annotated[bool, "Continue the --json of the same run that ended early."] = False


@click.command()
@options_as(_Options)
def check(options: _Options) -> None:
    """Check backends against the contract.

    NAME is a registered backend, `available` (every backend made for the device) or `all`. Each failure is printed with
    its reason and the command that repeats it. The exit status is 0 only if every backend passes; a backend for which
    no check ran does not pass.

    With --engine, NAME is a metadata builder of that installed engine, or a draft backend of SGLang. Its claims are
    checked on the CPU, with no running engine, model or GPU. On the CPU, Triton kernels run in Triton's interpreter.

    A check newer than the contract that a backend was built for is a preview and fails nothing. Notes below the summary
    report what no result shows, such as a known failure that covers nothing. The soak family drafts thousands of rounds
    while requests join and leave; it runs only if --family or --only names it.

    Many cases are drawn from what the backend claims, from --seed. A claim that no passed check covers is listed below
    the summary; with --strict-claims it is a failure.

    Each backend runs in a subprocess: if a check ends the process, crashes it, or hangs for ten minutes, the check is
    named and the other backends still run. --no-isolate runs the checks in this process, for a debugger.

    With --json, results are saved in FILE.part as they arrive; --resume continues a run that ended early.
    """
    if options.resume and options.target is None:
        raise UserError("--resume needs the --json of the run to continue. Add --json.")
    where = resolve_device("cpu" if options.engine and options.device is None else options.device)
    interpret_kernels_on(where)
    use_threads(options.threads)
    chosen = _chosen_builders(options, where) if options.engine else _chosen_backends(options, where)
    _require_known(options.families)
    if options.strict_claims and (options.families or options.checks or options.quick or options.engine):
        raise UserError(
            "--strict-claims needs all checks of a backend, but --family, --only, --quick or --engine leaves some out. "
            "Omit it, or omit --strict-claims."
        )
    isolated = set() if options.engine else _isolated(chosen, options.isolate)
    paths = _report_paths(options.target, chosen, f"check-{options.engine}-" if options.engine else "check-")
    shown = (options.verbose, options.quick, options.engine or "", _soak_length(options), options.seed or 0)
    run = CheckRun(stdout(), where, options.families, options.checks, *shown, again=click.get_current_context().obj)
    reports = [_check_and_save(run, name, name in isolated, paths.get(name), options.resume) for name in chosen]
    if options.checks and not any(report.results for report in reports if report):
        raise _no_such_check(options.checks)
    unverified = options.strict_claims and any(report.unverified for report in reports if report)
    if unverified or not all(report and report.ok for report in reports):
        raise SystemExit(1)


def _chosen_backends(options: _Options, where: torch.device) -> list[str]:
    if not options.names:
        raise click.UsageError("Missing argument 'NAME...'.")
    if "available" in options.names:
        _print_refused_plug_ins()
    return chosen_names(options.names, where)


def _chosen_builders(options: _Options, where: torch.device) -> list[str]:
    assert options.engine is not None
    if where.type != "cpu" or options.isolate:
        raise UserError(
            "builders of an engine are checked on the CPU and in this process, where the engine is loaded once; got "
            f"{'--isolate' if options.isolate else f'--device {where}'}. Omit it."
        )
    return builder_names(options.engine, options.names)


def _isolated(names: Sequence[str], isolate: bool | None) -> set[str]:
    """Return the backends to run in a subprocess; those registered by a call in this process do not exist there."""
    from attn_backends import registry

    local = [name for name in names if registry.registered_here(name)]
    if isolate and local:
        raise UserError(
            f"--isolate needs backends that a subprocess has too, but {', '.join(local)} were registered by a call in "
            "this process. Omit --isolate, or declare them as entry points."
        )
    return set() if isolate is False else set(names) - set(local)


def _print_refused_plug_ins() -> None:
    """Try the plug-ins before `available` loads them, and name those that cannot be loaded."""
    for why in try_plug_ins_aloud().values():
        complain(f"not available: {why}")


def _check_and_save(run: CheckRun, name: str, isolated: bool, path: Path | None, resume: bool) -> Report | None:
    from attn_backends import BrokenBackend
    from spec_decode.conformance.kept_results import KeptResults

    notes: list[str] = []
    kept = KeptResults(path, resume=resume) if path else None
    try:
        report = run.of(name, isolated=isolated, kept=kept, on_note=notes.append)
        run.again()
    except BrokenBackend as error:
        run.again()
        # One backend of `all` that does not load must not cost the others their checks.
        complain(f"error: {error}")
        return None
    except KeyboardInterrupt as ended:
        found = f"; results so far are in {kept.path}, continue with --resume" if kept and kept.path.exists() else ""
        click.echo(f"interrupted in {name}: no report was written{found}", err=True)
        raise SystemExit(exit_status(ended)) from None
    if run.checks and not report.results:
        if kept:
            kept.discard()
        return report
    say(run.console, report.summary(), "green" if report.ok else "bold red")
    if report.unproven:
        say(run.console, f"    {report.unproven}", "bold red")
    for note in notes:
        say(run.console, f"    {note}", "yellow")
    if path is not None:
        write(path, report.to_json())
        KeptResults(path).discard()
        say(run.console, f"wrote {path}")
    return report


def _require_known(families: Sequence[str]) -> None:
    from spec_decode.conformance.coverage import FAMILIES

    if unknown := sorted(set(families) - set(FAMILIES)):
        raise UserError(
            f"a family must be one of {', '.join(FAMILIES)}, got {', '.join(map(repr, unknown))}. Fix --family."
            f"{did_you_mean(unknown[0], FAMILIES)}"
        )


def _soak_length(options: _Options) -> dict[str, int]:
    """Return rounds and seed if soaks were requested. Raises UserError for rounds without a soak."""
    given = {name: value for name, value in (("rounds", options.rounds), ("seed", options.seed)) if value is not None}
    if "soak" in options.families or any(pattern.startswith("soak.") for pattern in options.checks):
        from spec_decode.conformance.soak_checks import ROUNDS

        return {"rounds": ROUNDS, "seed": 0, **given}
    if options.rounds is not None:
        raise UserError("--rounds requires a soak. Add --family soak.")
    return {}


def _no_such_check(patterns: Sequence[str]) -> UserError:
    from spec_decode.conformance.check import check_names

    got = " or ".join(map(repr, patterns))
    return UserError(
        f"--only must match a check's name or name[case], but {got} matches none here. Fix --only."
        f"{did_you_mean(patterns[0].partition('[')[0].strip('*'), check_names())}"
    )


def _report_paths(target: str | None, names: Sequence[str], prefix: str) -> dict[str, Path]:
    """Return each report's path, made before anything runs, so that a bad path does not cost a run."""
    if target is None:
        return {}
    if target == "-":
        raise UserError("--json must name a file or a folder, got -: standard output shows the results. Name a file.")
    path = Path(target)
    if path.suffix != ".json" or path.is_dir() or target.endswith("/"):
        paths = {name: path / f"{prefix}{name}.json" for name in names}
    elif len(names) == 1:
        paths = {names[0]: path}
    else:
        raise UserError(
            f"several reports need a folder, but --json names the file {path} for {', '.join(names)}. Name a folder."
        )
    for path in paths.values():
        require_writable(path)
    return paths

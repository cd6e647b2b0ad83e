"""A run of `attn-backends matrix`: one backend after another, each in a subprocess, with progress."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click
import msgspec
import torch
from rich.console import Console

from attn_backends import registry
from spec_decode.cli.check import count_results
from spec_decode.cli.options import chosen_names
from spec_decode.cli.output import exit_status, progress, require_writable, say, write
from spec_decode.conformance.coverage import EVERYTHING
from spec_decode.conformance.report import Report
from spec_decode.conformance.subprocess_runner import TimeLimits, check_isolated
from spec_decode.environment import Environment, environment
from spec_decode.files import ReportError
from spec_decode.testing.outcome import Outcome


@dataclass(frozen=True, kw_only=True, slots=True)
class MatrixRun:
    """What to run and where the reports go. resume: keep reports that an equivalent earlier run finished there."""

    device: torch.device
    limits: TimeLimits
    tags: tuple[str, ...] = ()
    into: Path | None = None
    resume: bool = False

    def of(self, requested: Sequence[str]) -> list[Report]:
        """Return the reports of these backends; `available` means every backend made for the device.

        No backend is loaded in this process. On an interrupt raises SystemExit; finished reports are kept, and nothing
        of the backend that was running.
        """
        console = Console(stderr=True, highlight=False)
        named = chosen_names([name for name in requested if name != "available"], self.device)
        known = (*registry.names(), *registry.state_names())
        others = [name for name in known if name not in named] if "available" in requested else []
        every = [*named, *others]
        for name in every:
            require_writable(self._path(name))
        env = environment(self.device)
        found: list[Report] = []
        for number, name in enumerate(every, 1):
            try:
                report = self._finished(name, env) or self._check(console, f"{number}/{len(every)} {name}", name, env)
            except KeyboardInterrupt as ended:
                self._interrupted(name, len(found))
                raise SystemExit(exit_status(ended)) from None
            if name in others and (why := _not_made_for_this(report)):
                say(console, f"{name}: not available: {why}", "dim")
                continue
            self._keep(report)
            say(console, report.summary(), "green" if report.ok else "bold red")
            found.append(report)
        return found

    def _command(self, name: str) -> str:
        tags = [part for tag in self.tags for part in ("--tag", tag)]
        return shlex.join(["attn-backends", "matrix", "--run", name, "--device", str(self.device), *tags])

    def _path(self, name: str) -> Path | None:
        return self.into and self.into / f"check-{name}.json"

    def _check(self, console: Console, title: str, name: str, env: Environment) -> Report:
        request = {"device": str(self.device), "tags": list(self.tags), "command": self._command(name)}
        with progress(console, f"{title}: loading") as update:
            on_result = count_results(title, update)
            return check_isolated(name, env=env, request=request, limits=self.limits, on_result=on_result)

    def _finished(self, name: str, env: Environment) -> Report | None:
        """Return the kept report of an earlier run on the same machine, software and source, if it completed."""
        path = self._path(name)
        if not self.resume or path is None or not path.is_file():
            return None
        try:
            report = Report.load(path)
        except ReportError:
            return None
        same = msgspec.structs.replace(report.env, date=env.date) == env and not report.sources.changed()
        whole = not report.counts[Outcome.NOT_RUN]
        return report if same and whole and report.command == self._command(name) else None

    def _keep(self, report: Report) -> None:
        if path := self._path(report.backend):
            write(path, report.to_json())

    def _interrupted(self, name: str, finished: int) -> None:
        kept = (
            f"{finished} finished reports are in {self.into}: continue with --resume"
            if self.into
            else "nothing was kept"
        )
        click.echo(f"interrupted in {name}: {kept}", err=True)


def _not_made_for_this(report: Report) -> str:
    """Return why a backend is not made for this machine; empty if it is."""
    if report.counts[Outcome.UNAVAILABLE] == len(report.results):
        return report.results[0].reason
    claim = report.claims.get(EVERYTHING)
    return claim.reason if claim is not None and not claim.claimed else ""

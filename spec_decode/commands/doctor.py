"""`attn-backends doctor`: what this machine has for drafting, and what stands in the way."""

from __future__ import annotations

import json
from dataclasses import asdict

import click

from spec_decode.commands.common import device_option, resolve_device, say, stdout

_STYLES = {"fine": "green", "absent": "dim", "refused": "yellow", "failed": "bold red"}
_WIDTHS = (26, 8)


@click.command()
@device_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead.")
def doctor(device: str | None, as_json: bool) -> None:
    """Say what is installed, which kernels are found, what is refused and why, and whether graphs work here.

    Exit status 1 if something that is here does not work.
    """
    from spec_decode.doctor import State, examine

    where = resolve_device(device, present=False)
    console, topic, findings = stdout(), "", []
    for finding in examine(where):
        findings.append(finding)
        if as_json:
            continue
        if finding.topic != topic:
            topic = finding.topic
            say(console, topic, "bold")
        label = f"  {finding.subject:<{_WIDTHS[0]}}  {finding.state.value:<{_WIDTHS[1]}}  "
        say(console, f"{label}{' '.join(finding.words.split())}", _STYLES[finding.state.value])
    if as_json:
        click.echo(json.dumps([asdict(finding) for finding in findings], indent=2))
    if any(finding.state is State.FAILED for finding in findings):
        raise click.exceptions.Exit(1)

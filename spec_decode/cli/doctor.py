"""`attn-backends doctor`: what this machine has for drafting, and what stands in the way."""

from __future__ import annotations

import json
from dataclasses import asdict
from itertools import chain

import click

from spec_decode.cli.common import device_option, resolve_device, say, stdout

_STYLES = {"fine": "green", "absent": "dim", "refused": "yellow", "failed": "bold red"}
_WIDTHS = (26, 8)


@click.command()
@device_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead.")
@click.option("--watch", "watched", metavar="NAME", help="Draft with this backend too, under watch.")
@click.option("--rounds", type=click.IntRange(min=1), default=100, show_default=True, help="Rounds under watch.")
@click.option("--every", type=click.IntRange(min=1), default=1, show_default=True, help="Look at every N-th of them.")
@click.option("--page-size", type=click.IntRange(min=1), help="Tokens a page under watch; 16 if left out.")
def doctor(
    device: str | None, as_json: bool, watched: str | None, rounds: int, every: int, page_size: int | None
) -> None:
    """Say what is installed, which kernels are found, what is refused and why, and whether graphs work here.

    With --watch a small random draft model runs while requests join and leave; what its kernels read is compared
    with fresh builds and its attention with an oracle, and the first field that drifts is named. Exit status 1 if
    something that is here does not work.
    """
    from attn_backends import registry
    from spec_decode.tools.doctor import State, examine, under_watch
    from spec_decode.tools.plug_ins import try_plug_ins

    where = resolve_device(device, present=watched is not None)
    console, topic, findings = stdout(), "", []
    try_plug_ins()
    # Asked for by name, a backend that cannot be had is refused before anything runs.
    asked = [] if watched is None else [registry.get(watched)]
    looks = (under_watch(b, where, rounds=rounds, every=every, page_size=page_size) for b in asked)
    for finding in chain(examine(where), looks):
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

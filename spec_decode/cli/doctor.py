"""`attn-backends doctor`: what this machine has for drafting, and what is missing or fails."""

from __future__ import annotations

import json
from dataclasses import asdict
from importlib import import_module
from itertools import chain

import click

from spec_decode.cli.options import PAGE_SIZE, device_option, resolve_device, try_plug_ins_aloud
from spec_decode.cli.output import UserError, say, stdout

_ENGINES = ("vllm", "sglang")
"""Engines with a plug-in in this repository, as modules of `attn_backends.engines`."""
_STYLES = {"ok": "green", "absent": "dim", "refused": "yellow", "failed": "bold red"}
_WIDTHS = (26, 8)


@click.command()
@device_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead.")
@click.option(
    "--validate-metadata", "backend", metavar="NAME", help="Draft with this backend and validate its metadata."
)
@click.option("--rounds", type=click.IntRange(min=1), help="Rounds to draft; default 100.")
@click.option("--every", type=click.IntRange(min=1), help="Validate every N-th round; default 1.")
@click.option("--page-size", type=PAGE_SIZE, help="Tokens per page; default 16.")
def doctor(
    device: str | None, as_json: bool, backend: str | None, rounds: int | None, every: int | None, page_size: int | None
) -> None:
    """Show what is installed, which kernels and engines are found, what is rejected and why, and whether graphs work.

    With --validate-metadata, a small random draft model runs while requests join and leave. Its metadata is compared
    with fresh builds and its attention with an oracle, and the first field that drifts is named. The exit status is 1
    if something that is installed does not work.
    """
    from attn_backends import registry
    from attn_backends.findings import FindingStatus
    from spec_decode.tools.doctor import examine, validate_metadata

    given = {"--rounds": rounds, "--every": every, "--page-size": page_size}
    if backend is None and (unused := [option for option, value in given.items() if value is not None]):
        raise UserError(f"{unused[0]} requires --validate-metadata. Add it.")
    where = resolve_device(device, present=backend is not None)
    console, topic, findings = stdout(), "", []
    try_plug_ins_aloud()
    # A backend requested by name that cannot be loaded raises before anything runs.
    chosen = [] if backend is None else [registry.get(backend)]
    validated = (
        validate_metadata(b, where, rounds=rounds or 100, every=every or 1, page_size=page_size) for b in chosen
    )
    engines = chain.from_iterable(
        import_module(f"attn_backends.engines.{engine}.doctor").examine() for engine in _ENGINES
    )
    for finding in chain(examine(where), engines, validated):
        findings.append(finding)
        if as_json:
            continue
        if finding.topic != topic:
            topic = finding.topic
            say(console, topic, "bold")
        label = f"  {finding.subject:<{_WIDTHS[0]}}  {finding.status.value:<{_WIDTHS[1]}}  "
        say(console, f"{label}{' '.join(finding.detail.split())}", _STYLES[finding.status.value])
    if as_json:
        click.echo(json.dumps([asdict(finding) for finding in findings], indent=2))
    if any(finding.status is FindingStatus.FAILED for finding in findings):
        raise click.exceptions.Exit(1)

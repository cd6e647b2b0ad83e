"""`attn-backends bench`: the benchmarks, which are part of a checkout but not of the wheel."""

from __future__ import annotations

import click

from spec_decode.cli.checkout import from_checkout


@click.command(add_help_option=False, context_settings={"ignore_unknown_options": True})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def bench(context: click.Context, arguments: tuple[str, ...]) -> None:
    """Time the drafter and its parts, from a checkout."""
    command: click.Command = from_checkout("benchmarks.command", what="the benchmarks", folder="benchmarks").bench
    with command.make_context("bench", list(arguments), parent=context.parent) as inner:
        command.invoke(inner)

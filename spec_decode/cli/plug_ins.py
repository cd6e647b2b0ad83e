"""Plug-ins, tried in a subprocess and named while they are, so that one that hangs is seen."""

from __future__ import annotations

from spec_decode.cli.output import printable, progress, stdout


def try_plug_ins_aloud() -> dict[str, str]:
    """`try_plug_ins`, which shows what is being loaded; without plug-ins it shows nothing."""
    from attn_backends import registry
    from spec_decode.tools.plug_ins import try_plug_ins

    if not registry.plug_ins():
        return {}
    with progress(stdout(), each=True) as update:
        return try_plug_ins(
            on_loading=lambda plug_in: update(printable(f"loading backend {plug_in.name} of package {plug_in.package}"))
        )

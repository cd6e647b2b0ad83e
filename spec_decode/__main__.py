"""``python -m spec_decode``: the command line where its entry point is not installed."""

from spec_decode.cli.main import main

main(prog_name="attn-backends")

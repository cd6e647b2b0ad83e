"""``python -m spec_decode``: the command line where its entry point is not installed."""

import sys


def main() -> None:
    """The command line; an interrupt ends it with 130 and without a traceback, even while it is loaded."""
    try:
        from spec_decode.cli.main import main

        main(prog_name="attn-backends")
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()

"""``python -m spec_decode``: the command line without its installed entry point."""

import sys

from spec_decode.testing.process_exit import end_at_once, running_threads


def main() -> None:
    """Run the command line. An interrupt, even during import, exits with status 130 and no traceback.

    Threads that a plug-in leaves running are not joined.
    """
    try:
        from spec_decode.cli.main import main

        main(prog_name="attn-backends")
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        status = 130
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else 0 if ended.code is None else 1
    else:
        status = 0
    if threads := ", ".join(running_threads()):
        print(f"not waiting for {threads}, which a backend started and left running", file=sys.stderr)
        end_at_once(status)
    # An interrupt inside executed code (dataclasses exec while a class is made) sets a flag that makes `python -m` end
    # with the signal even if the interrupt was caught. Executing another string clears the flag.
    exec("")
    sys.exit(status)


if __name__ == "__main__":
    main()

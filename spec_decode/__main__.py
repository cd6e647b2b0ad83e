"""``python -m spec_decode``: the command line where its entry point is not installed."""

import sys

from spec_decode.testing.process_exit import end_at_once, running_threads


def main() -> None:
    """The command line; an interrupt ends it with 130 and without a traceback, even while it is loaded.

    Threads that a plug-in leaves running are not waited for.
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
        print(f"not waited for: {threads}, which a backend has started and left running", file=sys.stderr)
        end_at_once(status)
    # An interrupt in an executed string, which a dataclass has while it is made, leaves a mark by which `python -m`
    # ends with the signal, whoever caught it. Another executed string clears the mark.
    exec("")
    sys.exit(status)


if __name__ == "__main__":
    main()

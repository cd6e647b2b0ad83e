"""The command line `attn-backends`. Each verb imports what it needs when it runs, so help is fast."""

from __future__ import annotations

import errno
import os
import sys
from io import TextIOWrapper
from pathlib import Path
from typing import Any

import click

from spec_decode.cli.bench import bench
from spec_decode.cli.check import check
from spec_decode.cli.demo import demo
from spec_decode.cli.doctor import doctor
from spec_decode.cli.draft import draft
from spec_decode.cli.list import list_backends
from spec_decode.cli.matrix import matrix
from spec_decode.cli.new import new
from spec_decode.cli.output import UserError, exit_status, interrupts


def _user_errors() -> tuple[type[Exception], ...]:
    """Return the library's exceptions that user input can cause."""
    from attn_backends import BackendError
    from builders import BatchError, SpecError
    from spec_decode.drafter import StrategyError
    from spec_decode.files import ReportError
    from spec_decode.models import CheckpointError

    return BackendError, BatchError, SpecError, CheckpointError, ReportError, StrategyError


def _is_out_of_memory(error: Exception) -> bool:
    """torch has a dedicated exception type only for a GPU."""
    names = {each.__name__ for each in type(error).__mro__}
    return bool(names & {"MemoryError", "OutOfMemoryError"}) or "can't allocate memory" in str(error)


class _Verbs(click.Group):
    """Turns errors that a user can cause into one line and exit status 2, Ctrl-C into 130 and SIGTERM into 143;
    anything else is a bug. The context's `obj` raises a swallowed interrupt again."""

    def main(self, *arguments: Any, **options: Any) -> Any:
        try:
            return super().main(*arguments, **options)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            # Unwritten output cannot be written: the interpreter must not try again at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            click.echo(f"error: the output has no room: {error.strerror}; it is incomplete.", err=True)
            sys.exit(2)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            with interrupts() as ctx.obj:
                return super().invoke(ctx)
        except KeyboardInterrupt as ended:
            click.echo("\ninterrupted", err=True)  # after ^C, or in the middle of a growing text
            ctx.exit(exit_status(ended))
        except click.NoSuchOption as error:
            # click finds up to three, best first, but would sort them alphabetically.
            if error.possibilities:
                del error.possibilities[1:]
            raise
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.ENAMETOOLONG) or error.filename is None:
                raise
            raise UserError(f"{error.filename} cannot be used: {error.strerror}. Name another path.") from error
        except Exception as error:
            if isinstance(error, _user_errors()):
                raise UserError(str(error)) from error
            if _is_out_of_memory(error):
                why = str(error).partition("\n")[0]
                raise UserError(f"the request does not fit the memory: {why}. Request less.") from error
            raise


@click.group(
    cls=_Verbs, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100, "show_default": True}
)
@click.version_option(package_name="attn-backends")
def main() -> None:
    """Attention backends whose metadata advances in place, their checks, and a drafter that uses them."""
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a prompt can have characters the terminal cannot encode
    if sys.prefix != sys.base_prefix:
        # Compiled kernels belong to the environment that made them, not to the home folder.
        os.environ.setdefault("TRITON_CACHE_DIR", str(Path(sys.prefix) / "cache" / "triton"))


for _verb in (demo, list_backends, new, check, draft, matrix, bench, doctor):
    main.add_command(_verb)

"""The command line. Each command lives in a file of its own, imported when it is called.

Exit codes: 0 fine, 1 the answer is no (names missing, does not fit), 2 bad use or bad input, told in one line on stderr.
"""

from __future__ import annotations

import sys
from importlib import import_module

import click

from streamload import __version__
from streamload.errors import LoadError, StreamloadError

_COMMANDS = ("inspect", "plan", "load", "explain", "embed", "bench")


class _Commands(click.Group):
    """Finds commands by name, so that ``inspect`` need not import what ``load`` does."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        command = import_module(f"streamload.cli.{cmd_name}").command
        assert isinstance(command, click.Command)
        return command


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]}, no_args_is_help=False)
@click.version_option(__version__, prog_name="streamload")
def cli() -> None:
    """Load checkpoints that are bigger than the host, within a memory budget."""


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and leave with its exit code."""
    try:
        code = cli.main(arguments, prog_name="streamload", standalone_mode=False)
    except click.exceptions.Abort as error:  # what click makes of KeyboardInterrupt, which says how far a load had come
        code = _fail("; ".join(["interrupted", *getattr(error.__cause__, "__notes__", ())]), 130)
    except click.ClickException as error:
        where = error.ctx.command_path if isinstance(error, click.UsageError) and error.ctx else "streamload"
        code = _fail(f"{error.format_message()} (see {where} --help)", 2)
    except StreamloadError as error:
        report = error.report if isinstance(error, LoadError) else None
        code = _fail(str(error), 1 if report is not None and not report.ok else 2)
    except SystemExit as error:
        # rich leaves with 1 when the reader of our output has left, but that is no answer
        code = 0 if isinstance(error.__context__, BrokenPipeError) else error.code
    sys.exit(code if isinstance(code, int) else 0)


def _fail(message: str, code: int) -> int:
    """Say ``message`` in one line on stderr."""
    from streamload.cli.draw import plain

    print("streamload:", plain("; ".join(filter(None, map(str.strip, message.splitlines())))), file=sys.stderr)
    return code

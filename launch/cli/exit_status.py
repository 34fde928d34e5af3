"""The exit statuses of commands, and the errors behind them on standard error. It imports nothing large."""

import io
from collections.abc import Callable

import click

from ...core.errors import FlexmarlError
from ..monitoring.console.echo import echo

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_STOPPED = 130


def exit_status(work: Callable[[], int]) -> int:
    """The status of ``work``. Errors that are a command's refusal or failure are printed, and have theirs."""
    try:
        return work()
    except click.ClickException as error:
        whole = _Whole()
        error.show(whole)
        echo(whole.getvalue(), err=True, nl=False)
        return error.exit_code
    except click.Abort:
        echo("flexmarl: stopped", err=True)
        return EXIT_STOPPED
    except FlexmarlError as error:
        _print_error(f"flexmarl: {error}")
        return EXIT_USAGE
    except OSError as error:
        _print_error(f"flexmarl: {error}")
        return EXIT_FAILED


class _Whole(io.StringIO):
    """A text from click, which takes out of it what looks like a colour unless it is for a terminal."""

    def isatty(self) -> bool:
        return True


def _print_error(text: str) -> None:
    from ..monitoring.console.progress_views import print_line  # imported here: few commands need rich
    from ..monitoring.console.terminal import Terminal

    print_line(Terminal(stderr=True, soft_wrap=True), text)

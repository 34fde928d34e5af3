"""The exit statuses of commands, and the errors behind them on standard error. It imports nothing large."""

from collections.abc import Callable

import click

from ..core.errors import FlexmarlError

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_STOPPED = 130


def exit_status(work: Callable[[], int]) -> int:
    """The status of ``work``. Errors that are a command's refusal or failure are printed, and have theirs."""
    try:
        return work()
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except click.Abort:
        click.echo("flexmarl: stopped", err=True)
        return EXIT_STOPPED
    except FlexmarlError as error:
        _print_error(f"flexmarl: {error}")
        return EXIT_USAGE
    except OSError as error:
        _print_error(f"flexmarl: {error}")
        return EXIT_FAILED


def _print_error(text: str) -> None:
    from rich.console import Console  # imported here: few commands need it

    from .console.progress_views import print_line

    print_line(Console(stderr=True, soft_wrap=True), text)

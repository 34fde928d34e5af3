"""Entry point of the ``flexmarl`` command. It imports nothing heavy first, so that ctrl-C works from the start."""

import sys
from collections.abc import Sequence

from ..hosts.search_path import leave_working_directory


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns the exit status of the process: 0 done, 1 failed, 2 refused, 130 stopped.

    ``arguments``: None for those of this process, which then imports nothing from the working directory."""
    if arguments is None:
        leave_working_directory()
    try:
        from . import registry as commands

        return commands.run(arguments)
    except KeyboardInterrupt:
        print("flexmarl: stopped", file=sys.stderr)  # noqa: T201  # click may not have been imported yet
        return 130


if __name__ == "__main__":
    sys.exit(main())

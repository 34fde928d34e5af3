"""A process that torchrun has started: head or node of a run, or one that waits for its host's."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from ...actors.errors import ConfigError
from ..cli import registry as commands
from ..cli.exit_status import EXIT_STOPPED, exit_status
from ..hosts import env
from ..hosts.local_address import own_address_toward
from .local_ranks import Leader, follow
from .place import Place

_DECIDED: Final = {"nodes": "--nodes", "hosts": "--hosts", "resume": "--resume", "dry_run": "--dry-run"}
"""Options of ``flexmarl train`` that have no meaning here, by parameter."""


def main() -> int:
    """Returns the exit status: the run's. A run that was stopped has 0, so that torchrun does not start it again."""
    try:
        return exit_status(lambda: _work(sys.argv[1:]))
    except KeyboardInterrupt:
        return EXIT_STOPPED


def _work(arguments: Sequence[str]) -> int:
    place = Place.of(env.torchrun_variables())
    if place.role == "waits":
        return follow(place.gathering)
    with Leader(place.gathering, place.locals - 1) as leader:
        status = exit_status(lambda: commands.invoke(as_command(place, arguments)))
        status = 0 if status == EXIT_STOPPED else status
        leader.release(status)
        return status


def as_command(place: Place, arguments: Sequence[str]) -> list[str]:
    """The arguments of ``flexmarl`` for the head, or for the node of another host.

    ``arguments``: of ``flexmarl train``. Raises ConfigError, and click's errors for an invalid option."""
    from ..cli.train import train  # imported here: it needs seconds, and most processes of a host only wait

    parameters = train.make_context("torchrun", list(arguments)).params
    if names := [option for parameter, option in _DECIDED.items() if parameters[parameter]]:
        raise ConfigError(
            f"{', '.join(names)}: leave it out: torchrun decides about the hosts, and its restarts continue the run"
        )
    name = parameters["name"] or place.job
    if name is None:
        raise ConfigError(
            "the run needs a name that is the same after a restart: write --name, or torchrun's --rdzv-id"
        )
    if place.host:
        address = Path(parameters["runs"], name, "address")
        return ["node", "--join", str(address), "--name", f"{env.host_name()}-{place.host}"]
    listen = [f"network.listen={_listen(place)}"] if place.hosts > 1 else []
    return ["train", *listen, *arguments, "--name", name, "--continue", "--nodes", str(place.hosts - 1)]


def _listen(place: Place) -> str:
    try:
        return own_address_toward(place.master)
    except OSError as error:
        raise ConfigError(
            f"environment variable MASTER_ADDR={place.master}: {error.strerror}: give torchrun a name or "
            "address of the first host that is known here, by --rdzv-endpoint or --master-addr"
        ) from None

"""The place of a process among those that torchrun has started, by its environment. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, Self

from ...actors.errors import ConfigError

Variables = Mapping[str, str]
Role = Literal["head", "node", "waits"]

_NO_ID: Final = "none"
"""torchrun's id of a job that was given no ``--rdzv-id``."""
_REMEDY: Final = "start it by torchrun -m flexmarl.launch.torchrun RECIPE"


@dataclass(frozen=True, slots=True)
class Place:
    """``host``: its number, of ``hosts``. ``local``: the number of the process on its host, of ``locals``. ``master``:
    name or address of the first host. ``job``: the id of the job, the same after a restart; None if it has none.
    ``gathering``: a name for the processes of this start on this host."""

    host: int
    hosts: int
    local: int
    locals: int
    master: str
    job: str | None
    gathering: str

    @classmethod
    def of(cls, variables: Variables) -> Self:
        """Raises ConfigError with the variable that is missing, or those that contradict each other."""
        rank, _ = _rank(variables, "RANK", "WORLD_SIZE")
        host, hosts = _rank(variables, "GROUP_RANK", "GROUP_WORLD_SIZE")
        local, locals_ = _rank(variables, "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        if (rank == 0) != (host == 0 and local == 0):
            raise _contradiction(variables, "RANK", "GROUP_RANK", "LOCAL_RANK")
        job = variables.get("TORCHELASTIC_RUN_ID", _NO_ID)
        master = _text(variables, "MASTER_ADDR")
        gathering = f"{job} {_text(variables, 'MASTER_PORT')} {host}"
        return cls(host, hosts, local, locals_, master, None if job == _NO_ID else job, gathering)

    @property
    def role(self) -> Role:
        """The work of this process: on each host the first one runs the head or a node, and all others wait for its
        end."""
        if self.local:
            return "waits"
        return "node" if self.host else "head"


def _text(variables: Variables, name: str) -> str:
    if not (value := variables.get(name)):
        raise ConfigError(f"environment variable {name} is missing: {_REMEDY}")
    return value


def _number(variables: Variables, name: str) -> int:
    value = _text(variables, name)
    if not value.isdecimal():
        raise ConfigError(f"environment variable {name}={value}: must be a number: {_REMEDY}")
    return int(value)


def _rank(variables: Variables, rank: str, count: str) -> tuple[int, int]:
    index, of = _number(variables, rank), _number(variables, count)
    if index >= of:
        raise _contradiction(variables, rank, count)
    return index, of


def _contradiction(variables: Variables, *names: str) -> ConfigError:
    values = ", ".join(f"{name}={variables[name]}" for name in names)
    return ConfigError(f"the environment variables {values} contradict each other: {_REMEDY}")

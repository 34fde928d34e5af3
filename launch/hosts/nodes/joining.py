"""The messages by which a node joins a run, and the reasons for which it is refused."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Protocol

from ....core.actor import endpoint
from ....core.base.names import checked_name
from ....core.base.texts import listing
from ....core.errors import FlexmarlError
from ....core.protocol.session import Settings
from ....core.ref import ActorRef
from ....core.supervision.remote_node import NodeApi
from ...run.resuming import changed_files
from ..host_description import HostDescription, version_problems

NAME: Final = "nodes"


class NodeRefused(FlexmarlError):
    """A host can't take part in a run; each problem says what differs."""

    def __init__(self, node: str, problems: list[str]) -> None:
        super().__init__(f"node {node} is refused:{listing(problems)}")
        self.node = node
        self.problems = problems


class NameTaken(FlexmarlError):
    """A node of the run has this name: another host, or an earlier process of this one that is not given up yet."""

    def __init__(self, node: str) -> None:
        self.problem = f"there is a node of the name {node} already: give each host another --name"
        super().__init__(f"node {node} is refused: {self.problem}")
        self.node = node


@dataclass(frozen=True, slots=True)
class Offer:
    """A run, for nodes that may join. ``folder``, ``recipe``: paths that have to be the same on all hosts.
    ``environment``: variables of its actors, beside those of their host. ``modules``: those they import."""

    folder: str
    recipe: str
    settings: Settings
    environment: dict[str, str]
    modules: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Joining:
    """A host that wants to be a node. ``recipe_files``: digests, by name. ``seen_address``: of the head, as the run's
    folder has it there; ``folder_problem``: the reason why it can't be read or written there, or empty."""

    host: HostDescription
    recipe_files: dict[str, str]
    seen_address: str
    folder_problem: str


@dataclass(frozen=True, slots=True)
class Dismissal:
    """``failed``: the run has failed, or has given the node up."""

    reason: str
    failed: bool = False


GIVEN_UP: Final = Dismissal("the run has given it up", failed=True)


class NodesApi(Protocol):
    """The head's actor that the nodes of a run call, in the order of its methods."""

    @endpoint
    async def offer(self) -> Offer:
        """The run that a node may join. A node compares it with its host before it calls ``join``."""

    @endpoint(raises=[NameTaken, NodeRefused])
    async def join(self, joining: Joining, node: ActorRef[NodeApi]) -> None:
        """From now on actors may be started on ``node``."""

    @endpoint
    async def stay(self, name: str) -> Dismissal:
        """Returns when the node is dismissed."""


@dataclass(frozen=True, slots=True)
class Head:
    """The head's side of the comparison. ``address``: that nodes have to find in the run's folder."""

    host: HostDescription
    offer: Offer
    recipe_files: dict[str, str]
    address: str


def refusals(head: Head, joining: Joining) -> Iterator[str]:
    """The reasons why a host may not join the run of ``head``, each a sentence with its remedy: name, versions, folder
    and recipe. Empty if it may join."""
    try:
        checked_name(joining.host.name)
    except ValueError as error:
        yield f"{error}; give the host another --name"
    if joining.host.name == head.host.name:
        yield f"the head has the name {head.host.name} too: give each host another --name"
    yield from version_problems([head.host, joining.host])
    yield from _folder_problems(head, joining)
    yield from _recipe_problems(head, joining)


def _folder_problems(head: Head, joining: Joining) -> Iterator[str]:
    folder, problem = head.offer.folder, joining.folder_problem
    if not problem and joining.seen_address != head.address:
        problem = "it is another folder there"
    if problem:
        yield (
            f"{folder}, the run's folder, is not shared with {joining.host.name}: {problem}; put the folder of all "
            "runs (--runs) on a disk that all hosts have under the same path"
        )


def _recipe_problems(head: Head, joining: Joining) -> Iterator[str]:
    different: Mapping[str, str] = changed_files(head.recipe_files, joining.recipe_files)
    if different:
        files = ", ".join(
            f"{name} {how.replace('has changed', 'differs')}" for name, how in different.items()
        )
        yield f"the recipe {head.offer.recipe} is not the same on {joining.host.name}: {files}; copy it there"

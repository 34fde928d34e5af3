"""Tables of two agents, and columns of rows for them."""

from typing import Any

from flexmarl.actors.columns.declared_columns import Column
from flexmarl.actors.names import AgentName, PolicyName
from flexmarl.actors.store.policy_queue import LeaseOrder
from flexmarl.actors.store.schema import Schema
from flexmarl.actors.store.tables import Tables

COLUMNS = {"tokens": Column(type="tokens", required=True), "note": Column(type="str")}
AGENTS = ("a", "b")
A, B, SHARED = PolicyName("a"), PolicyName("b"), PolicyName("shared")
OWN = {AgentName("a"): A, AgentName("b"): B}
ONE = dict.fromkeys(OWN, SHARED)
Policies = dict[AgentName, PolicyName]


def make(policies: Policies = OWN, order: LeaseOrder = "arrival") -> Tables:
    # The agents declare different columns, in different places.
    schemas = {
        AgentName("a"): Schema(COLUMNS),
        AgentName("b"): Schema({"only_b": Column(type="int"), **COLUMNS}),
    }
    return Tables(policies, schemas, order=order)


def columns(*ids: str, **more: list[Any]) -> dict[str, Any]:
    tokens = [["m-1", 64 * place, 8, "int32", [2]] for place in range(len(ids))]
    plain = {"policy_version": [3] * len(ids), "reward": [1.0] * len(ids), "tokens": tokens}
    return {"sample_id": list(ids), **plain, **more}


FIRST = 1 << 32 | 1

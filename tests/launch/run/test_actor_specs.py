"""The actors of a run: every class takes the setup that it gets, and has the endpoints that the others call."""

from dataclasses import replace
from pathlib import Path
from typing import Any, cast, get_type_hints

import msgpack
import pytest

from flexmarl.actors.inference.instance_setup import InstanceSetup
from flexmarl.actors.inference.router.router_setup import RouterSetup
from flexmarl.actors.messages import (
    InstanceApi,
    OrchestratorApi,
    RewardsApi,
    RolloutApi,
    RouterApi,
    SlotApi,
    StoreApi,
    TrainerApi,
)
from flexmarl.actors.names import AgentName, PolicyName, Step, Version
from flexmarl.actors.orchestrator.checkpoint import RunState
from flexmarl.actors.orchestrator.orchestrator_setup import OrchestratorSetup
from flexmarl.actors.rollout.rollout_setup import RolloutSetup
from flexmarl.actors.trainer.trainer_setup import TrainerSetup
from flexmarl.core.protocol import codec
from flexmarl.core.ref import ActorRef
from flexmarl.core.signature import signature_of
from flexmarl.core.supervision.worker_init import import_class
from flexmarl.launch.config.config_reading import resolve
from flexmarl.launch.run.actor_specs import ActorSpec, References, actor_specs
from flexmarl.launch.run_folder.run_directory import RunDirectory

from ..conftest import TINY

APIS = {
    "store": StoreApi,
    "trainer": TrainerApi,
    "router": RouterApi,
    "rollout-0": RolloutApi,
    "orchestrator": OrchestratorApi,
    "rewards-0": RewardsApi,
}
SHARED = (
    "agents={solver: {policy: shared}, checker: {policy: shared}}",
    "agent_defaults.model=null",
    "policies={shared: {instances: 2, engine: {name: simulated}, trainer: {name: simulated}}}",
)


def ref(name: str) -> ActorRef[Any]:
    return ActorRef(name, f"ipc:///run/{name}.sock")


def specs(
    tmp_path: Path, *overrides: str, own_gpus: dict[str, tuple[str, ...]] | None = None
) -> dict[str, ActorSpec]:
    config = resolve(str(TINY), list(overrides))
    instances = {
        policies[0]: [ref(f"{policies[0]}-{n}") for n in range(count)]
        for policies, count in config.served_together().items()
    }
    workers = [ref(f"rollout-{n}") for n in range(config.rollout.workers)]
    references = References(
        ref("store"),
        ref("trainer"),
        ref("router"),
        workers,
        ref("orchestrator"),
        ref("console"),
        ref("supervisor"),
        instances,
        [ref(f"slot-{n}") for n in range(config.pool.slot_count)] if config.pool.name == "shared" else [],
        rewards=[ref(f"rewards-{n}") for n in range(config.rewards.services)],
    )
    state = RunState(Step(4), dict.fromkeys(config.policies, Version(3)), {0: {"accuracy": 0.5}})
    resume = (tmp_path / "checkpoints" / "step_000004", state)
    return actor_specs(config, RunDirectory(tmp_path), references, resume, own_gpus or {})


@pytest.mark.parametrize("overrides", [(), SHARED], ids=["own policies", "one simulated policy"])
def test_every_class_takes_its_setup_after_a_message_and_has_its_api(
    tmp_path: Path, overrides: tuple[str, ...]
) -> None:
    found = specs(tmp_path, *overrides, "rewards.services=1")
    assert APIS.keys() < found.keys() and len(found) == 8
    for name, spec in found.items():
        actor_class = import_class(spec.actor_class)
        assert APIS.get(name, InstanceApi) in actor_class.__mro__
        assert get_type_hints(actor_class.__init__)["setup"] is type(spec.setup)
        constructor = signature_of(cast(Any, actor_class), "__init__")
        assert constructor is not None
        sent = msgpack.unpackb(codec.Encoder().pack({"setup": spec.setup}), strict_map_key=False)
        assert constructor.arguments([], sent, None) == ((), {"setup": spec.setup})


def test_agents_of_one_policy_share_its_instances_and_its_plan(tmp_path: Path) -> None:
    found = specs(tmp_path, *SHARED, "agents.checker.sampling.temperature=0.5")
    shared, both = PolicyName("shared"), (AgentName("solver"), AgentName("checker"))
    rollout, orchestrator = found["rollout-0"].setup, found["orchestrator"].setup
    assert isinstance(rollout, RolloutSetup) and isinstance(orchestrator, OrchestratorSetup)
    assert {agent: settings.policy for agent, settings in rollout.agents.items()} == dict.fromkeys(
        both, shared
    )
    assert [rollout.agents[agent].sampling.temperature for agent in both] == [1.0, 0.5]
    instances = {
        name: spec.setup.policy for name, spec in found.items() if isinstance(spec.setup, InstanceSetup)
    }
    assert instances == {"shared-0": shared, "shared-1": shared}
    router = found["router"].setup
    assert isinstance(router, RouterSetup) and router.policies == (shared,)
    assert orchestrator.plan.policies == (shared,) and orchestrator.policies[shared].agents == both
    assert orchestrator.resume_from is not None and orchestrator.resume_from.versions == {shared: 3}


def test_adapters_over_one_model_have_the_same_instances(tmp_path: Path) -> None:
    found = specs(
        tmp_path,
        "agent_defaults.lora={rank: 2}",
        "agent_defaults.engine={name: vllm}",
        "agents.checker.instances=3",
    )
    solver, checker = PolicyName("solver"), PolicyName("checker")
    instances = {name: spec.setup for name, spec in found.items() if isinstance(spec.setup, InstanceSetup)}
    assert list(instances) == ["solver-0", "solver-1", "solver-2"]
    for setup in instances.values():
        assert (setup.policy, setup.beside) == (solver, (checker,))
        bases = [setup.policies[policy].base for policy in (solver, checker)]
        assert bases[0] is not None and bases[0].adapters == 2 and bases[0] == bases[1]


def test_rollout_workers_and_instances_are_restarted_alone(tmp_path: Path) -> None:
    found = specs(tmp_path, "rollout.workers=3")
    restarted = ["rollout-0", "rollout-1", "rollout-2", "solver-0", "checker-0"]
    assert [name for name, spec in found.items() if spec.restarted] == restarted
    orchestrator = found["orchestrator"].setup
    assert isinstance(orchestrator, OrchestratorSetup)
    assert [worker.name for worker in orchestrator.workers] == ["rollout-0", "rollout-1", "rollout-2"]


def test_slot_workers_are_restarted_alone_and_train_what_the_trainer_does(tmp_path: Path) -> None:
    found = specs(tmp_path, "pool={name: shared, slots: 2}", "checkpoint.every=0")
    trainer = found["trainer"].setup
    assert isinstance(trainer, TrainerSetup) and trainer.pool is not None
    assert [slot.name for slot in trainer.pool.slots] == ["slot-0", "slot-1"]
    assert trainer.pool.spill_dir == tmp_path / "suspended"
    for name in ("slot-0", "slot-1"):
        spec = found[name]
        assert SlotApi in import_class(spec.actor_class).__mro__
        assert spec.restarted and spec.cuda_devices is None
        assert spec.setup == replace(trainer, pool=None)


def test_actors_see_the_gpus_of_the_plan_alone(tmp_path: Path) -> None:
    own = {"slot-0": ("GPU-0",), "slot-1": ("GPU-1",), "solver-0": ("GPU-2", "GPU-3")}
    found = specs(tmp_path, "pool={name: shared, slots: 2}", own_gpus=own)
    assert {name: spec.cuda_devices for name, spec in found.items() if spec.cuda_devices} == own
    assert found["trainer"].cuda_devices is None and found["checker-0"].cuda_devices is None

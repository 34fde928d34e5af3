"""The trainer actor with simulated policies, in virtual time: one computation after the other, each of a given time."""

import asyncio
from pathlib import Path

import pytest

from flexmarl.actors.columns.store_client import ExperienceWriter, segment_directories
from flexmarl.actors.credit.credit_config import CreditConfig
from flexmarl.actors.json_files import read_json
from flexmarl.actors.messages import Sample
from flexmarl.actors.names import AgentName, PolicyName, Step
from flexmarl.actors.recipe.recipe import RecipeConfig
from flexmarl.actors.store.store import Store
from flexmarl.actors.trainer.backends.backend_config import SimulatedTrainerConfig
from flexmarl.actors.trainer.backends.simulated_policy import STATE_FILE
from flexmarl.actors.trainer.trainer import Trainer
from flexmarl.actors.trainer.trainer_setup import PolicySetup, TrainerSetup
from flexmarl.core.system import ActorSystem
from flexmarl.core.testing import virtual_time
from flexmarl.core.wire.memory import MemoryNetwork
from flexmarl.transport.state import StateTransport

from ...stores import store_setup

RECIPE = """
async def workflow(query, agents): ...
def train_query(position, seed): ...
def eval_queries(seed): ...
def sft(agent, batch, size, seed): return [("12", "34")] * size
"""


def sample(agent: str, number: int) -> Sample:
    """A sample of two tokens."""
    turn = 0 if agent == "solver" else 1
    tokens = ((), (7, 0), (-1.0, -1.0))
    return Sample(f"1:q_{turn}_{number}", agent, 1, 0, "1:q", 1.0, 0.5, *tokens)


def simulated_policy(agent: str, **costs: float) -> PolicySetup:
    return PolicySetup(trainer=SimulatedTrainerConfig(**costs), credit={AgentName(agent): CreditConfig()})


def test_steps_take_their_time_in_turn(tmp_path: Path) -> None:
    (tmp_path / "workflow.py").write_text(RECIPE)
    shared = tmp_path / "shared"
    shared.mkdir(mode=0o700)
    solver, judge = PolicyName("solver"), PolicyName("judge")
    policies = {
        solver: simulated_policy("solver", token_s=100.0, optimizer_s=30.0),
        judge: simulated_policy("judge", token_s=1.0, micro_batch_s=5.0),
    }

    async def main() -> None:
        time = asyncio.get_running_loop().time
        folder = shared / "store"
        folder.mkdir(mode=0o700)
        store = Store(store_setup(policies, folder))
        async with (
            ActorSystem("node", shared, wire=MemoryNetwork().wire("node")) as system,
            StateTransport(shared) as transport,
        ):
            store_ref = await system.add(store, "store")
            writer = ExperienceWriter(store_ref, "tests", segment_directories(shared, folder))
            await writer.put([sample("solver", n) for n in range(4)] + [sample("judge", n) for n in range(2)])
            recipe = RecipeConfig(folder=str(tmp_path), data={}, seed=3)
            setup = TrainerSetup(policies, recipe, 10, store_ref, folder)
            actor = Trainer(setup)
            trainer = (await system.add(actor, "trainer")).within(1e6)
            assert time() == 0.0
            assert 0 <= await trainer.sft(judge, 0, 2) < 1
            assert time() == pytest.approx(2 * 64 * 5)  # two batches; two letters each way and the end
            for policy in policies:
                await trainer.publish(policy)
            start = time()

            async def train(policy: PolicyName, count: int) -> float:
                await trainer.train(policy, 0, count)
                return time() - start

            ended = await asyncio.gather(train(solver, 3), train(judge, 2), train(solver, 1))
            assert ended == pytest.approx([600.0, 609.0, 809.0])
            stepped = await trainer.optimizer_step(solver, Step(1))
            assert time() - start == pytest.approx(839.0)
            assert (stepped.stats.samples, stepped.published.version) == (4, 1)
            assert (await store.table_statistics())["solver"].consumed == 4
            weights = await transport.get(stepped.published.handle)
            assert weights["state"][0] == 1
            await trainer.save(solver, str(tmp_path / "saved"))
            saved = read_json(tmp_path / "saved" / STATE_FILE)["trained"]
            assert saved == {"0": [f"1:q_0_{n}" for n in range(4)]}

    virtual_time.run(main())

"""The states and the files of a pool, which do not grow with the run."""

from pathlib import Path

import pytest

from flexmarl.actors.names import PolicyName, Step, Version
from flexmarl.actors.orchestrator.opponents.opponents import OpponentsSetup, _Pool
from flexmarl.actors.orchestrator.orchestrator_config import PoolOfConfig
from flexmarl.actors.recipe.recipe import Recipe, RecipeConfig

TINY = Path(__file__).parents[3] / "launch" / "recipes" / "tiny"


@pytest.mark.parametrize(("save_every", "most"), [(0, 3), (10, 6)])
def test_states_and_files_are_those_of_members_and_of_checkpoints(
    tmp_path: Path, save_every: int, most: int
) -> None:
    """Without a commit: ``committed`` removes more."""
    solver = PolicyName("solver")
    config = PoolOfConfig(policy=solver, every=1, size=4)
    recipe = Recipe(RecipeConfig(folder=str(TINY), data={}, seed=0))
    setup = OpponentsSetup(folder=tmp_path, checkpoints=tmp_path / "checkpoints", save_every=save_every)
    pool = _Pool(PolicyName("rival"), config, ((), ()), recipe, setup)
    pool.join(Step(0), {solver: Version(0)})
    pool.state.play(pool.state.members[0])
    folder = pool.file(pool.state.members[0]).parent
    folder.mkdir()
    setup.checkpoints.mkdir()
    for step in range(1, 41):
        pool.begin(Step(step), {solver: Version(step - 1)})
        for member in pool.to_keep.values():
            pool.file(member).touch()
        pool.to_keep.clear()
        pool.remove_files(setup.checkpoints)
    assert len(pool._after) <= most
    assert len(list(folder.iterdir())) <= config.size * most
    assert all(pool.file(member).exists() for member in pool.state.members)
    if save_every:
        assert [step for step in pool._after if step % 10 == 0] == [0, 10, 20, 30]
    assert pool.state_after(Step(39)).members == pool._after[Step(39)].members

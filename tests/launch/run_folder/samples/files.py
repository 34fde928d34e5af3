"""Runs' folders with recorded trajectories, made without a run."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from flexmarl.actors.compared_logprobs import Compared, pack_compared
from flexmarl.actors.messages import Query
from flexmarl.actors.recorded_trajectory import RecordedTrajectory, RecordedTurn, compress_record, pack_record
from flexmarl.launch.run_folder.run_directory import RunDirectory
from flexmarl.launch.run_folder.samples.sample_file import SampleFile

NO_LIMIT = 1 << 40


def trajectory(
    step: int,
    query: int,
    number: int,
    reward: float = 0.5,
    *,
    evaluation: bool = False,
    failure: str = "",
    text: str = "4",
) -> RecordedTrajectory:
    """The solver has ``reward``, the judge 1 - ``reward``; one that failed has the solver's turn alone."""
    rewards = {} if failure else {"solver": reward, "judge": 1 - reward}
    turns = [
        RecordedTurn(
            0, "solver", (f"{query}+2=",), text, 4, (52, 2), (-0.5, -0.01), step, "stop", reward, 0.25
        ),
        RecordedTurn(1, "judge", (0, "?"), "no", 7, (110,), (-1.5,), step, "length", 1 - reward, -0.25),
    ]
    if failure:
        turns = [turns[0]._replace(reward=None, advantage=None)]
    asked = Query(f"q{query}", f"{query}+2")
    metrics = {} if failure else {"accuracy": reward}
    return RecordedTrajectory(step, evaluation, asked, number, rewards, metrics, failure, tuple(turns))


def record(*trajectories: RecordedTrajectory) -> bytes:
    return compress_record(pack_record(trajectories))


def compared(*trajectories: RecordedTrajectory, by: float = 0.25, version: int = -1) -> bytes:
    """The trainer's log-probabilities of all turns, each ``by`` more than the engine's. ``version``: of the trainer's
    policy; -1: that of the turn."""
    return pack_compared(
        {
            f"{one.step}:{one.query.id}_{turn.number}_{one.number}": Compared(
                turn.version if version < 0 else version, np.full(len(turn.tokens), by, np.float16)
            )
            for one in trajectories
            for turn in one.turns
        }
    )


def recorded_run(
    folder: Path, records: Sequence[bytes] = (), config: str = "", *, steps: int = 50
) -> RunDirectory:
    directory = RunDirectory.create(folder, config)
    file = SampleFile(directory.samples, steps, NO_LIMIT)
    file.add(records)
    file.close()
    return directory

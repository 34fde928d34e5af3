"""Runs' folders with recorded trajectories, made without a run."""

from collections.abc import Sequence
from pathlib import Path

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


def recorded_run(
    folder: Path, records: Sequence[bytes] = (), config: str = "", *, steps: int = 50
) -> RunDirectory:
    directory = RunDirectory.create(folder, config)
    file = SampleFile(directory.samples, steps, NO_LIMIT)
    file.add(records)
    file.close()
    return directory

"""A section of the report: trajectories of evaluations, turn by turn."""

from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Final

from ....actors.recorded_trajectory import PromptPart, RecordedTrajectory, RecordedTurn
from ....core.base.texts import printable
from ...errors import SamplesUnreadable
from ...run_folder.run_directory import RunDirectory
from ...run_folder.samples.conversation import branches_of, call_text, facts_of, name_conversation, title_of
from ...run_folder.samples.reader import Samples
from .page_parts import note

# Characters of a trajectory's texts: nine of them leave the page well below a megabyte.
_MOST_CHARACTERS: Final = 30_000
_MOST_TURNS: Final = 100


def evaluated_trajectories(run_dir: Path) -> str:
    """The best, the median and the worst trajectory of the first, the middle and the last evaluation, by the mean
    reward of their agents; empty if none is recorded. A file that can't be read is named."""
    if not RunDirectory(run_dir).samples.exists():
        return ""
    try:
        with Samples(run_dir) as samples:
            chosen = [*_choose(samples)]
    except SamplesUnreadable as error:
        return f"<h2>Trajectories</h2>{note(str(error))}"
    if not chosen:
        return ""
    words = "By the mean reward of the agents. All that are recorded: flexmarl samples RUN --evaluation."
    shown = "".join(
        _render(kind, trajectory, is_open=number == 0) for number, (kind, trajectory) in enumerate(chosen)
    )
    return f"<h2>Trajectories of evaluations</h2>{note(words)}{shown}"


def _choose(samples: Samples) -> Iterator[tuple[str, RecordedTrajectory]]:
    steps = samples.recorded().evaluations
    for step in dict.fromkeys((steps[0], steps[len(steps) // 2], steps[-1])) if steps else ():
        ended = samples.count(step=step, evaluation=True, failed=False)
        places = {"best": ended - 1, "median": ended // 2, "worst": 0}
        seen: set[int] = set()
        for kind, place in places.items():
            if 0 <= place not in seen:
                seen.add(place)
                for trajectory in samples.trajectories(
                    order="worst", step=step, evaluation=True, skip=place, limit=1
                ):
                    yield kind, trajectory


def _render(kind: str, trajectory: RecordedTrajectory, *, is_open: bool) -> str:
    room = _MOST_CHARACTERS
    parts = []
    branches = branches_of(trajectory.turns)
    for turn in trajectory.turns[:_MOST_TURNS]:
        text, room = _turn(turn, room, is_branch=turn.number in branches)
        parts.append(text)
    if len(trajectory.turns) > _MOST_TURNS:
        parts.append(note(f"{len(trajectory.turns) - _MOST_TURNS} later turns are left out."))
    metrics = ", ".join(f"{printable(name)} {value:.4g}" for name, value in trajectory.metrics.items())
    head = f"<summary>{kind}: {escape(title_of(trajectory))}</summary>"
    return f"<details{' open' if is_open else ''}>{head}{note(metrics) if metrics else ''}{''.join(parts)}</details>"


def _turn(turn: RecordedTurn, room: int, *, is_branch: bool) -> tuple[str, int]:
    """``room``: characters that may be shown; returns what is left after it."""
    prompt = "\n".join(_prompt(part, is_branch=is_branch) for part in turn.prompt)
    prompt, room = _cut(prompt, room)
    said, room = _cut(turn.text, room)
    prompt = f'<pre class="asked">{escape(prompt)}</pre>' if prompt else ""
    head = f"<p><strong>{escape(turn.agent)}</strong> <small>{escape(facts_of(turn))}</small></p>"
    return f'{prompt}{head}<pre class="said">{escape(said)}</pre>', room


def _cut(text: str, room: int) -> tuple[str, int]:
    shown = printable(text[:room])
    more = len(text) - room
    return (f"{shown}... ({more} more characters)" if more > 0 else shown), max(0, room - len(text))


def _prompt(part: PromptPart, *, is_branch: bool) -> str:
    if isinstance(part, int):
        return f"[{name_conversation(part, is_branch=is_branch)}]"
    if isinstance(part, str):
        return part
    calls = "".join(f"\n  calls {call_text(call)}" for call in part.get("tool_calls") or ())
    return f"{part.get('role', '?')}: {part.get('content') or ''}{calls}"

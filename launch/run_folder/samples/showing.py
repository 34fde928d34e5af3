"""The output of ``flexmarl samples``."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from rich.table import Table

from ....actors.recorded_trajectory import RecordedTrajectory, RecordedTurn
from ...config.config_reading import check, read_yaml
from ...monitoring.console.echo import echo_json
from ...monitoring.console.terminal import Terminal
from ...monitoring.formatting import count, format_numbers
from ..line_writer import finite
from ..run_directory import RunDirectory
from .conversation import Shade, show
from .reader import Order, Samples

_PIPED_WIDTH: Final = 200


def show_trajectories(
    samples: Samples,
    run: Path,
    order: Order,
    limit: int,
    filters: Mapping[str, Any],
    *,
    tokens: bool,
    as_json: bool,
    shade: Shade = "probability",
) -> None:
    """Prints at most ``limit`` trajectories, the newest or best one first, and how many there are. ``shade``: of
    ``tokens``."""
    trajectories = samples.trajectories(order=order, limit=limit, **filters)
    if as_json:
        for trajectory in trajectories:
            echo_json(as_object(trajectory, tokens=tokens))
        return
    console = _console()
    texts = TokenTexts(run) if tokens and trajectories else None
    for trajectory in trajectories:
        show(console, trajectory, texts, shade)
    for name, problem in texts.problems.items() if texts else ():
        console.print(f"tokens are numbers, as the tokenizer {name} can't be loaded: {problem}")
    total = samples.count(**filters)
    console.print(f"{len(trajectories)} of {_count_of(total)}" if total else explain_empty(samples, filters))


def show_list(samples: Samples, filters: Mapping[str, Any], limit: int, *, as_json: bool) -> None:
    """Prints the newest ``limit`` turns at most, the oldest of them first."""
    rows = samples.rows(limit=limit, **filters)
    if as_json:
        for row in rows:
            echo_json(finite(row._asdict()))
        return
    console = _console()
    if rows:
        table = Table()
        for name in rows[0]._fields:
            table.add_column(name.replace("_", " "))
        for row in rows:
            table.add_row(*map(_cell, row))
        console.print(table)
    total = samples.count(**filters)
    words = f"{count(len(rows), 'turn')}, of {_count_of(total)}" if total else explain_empty(samples, filters)
    console.print(words)


def _count_of(trajectories: int) -> str:
    """``1 trajectory``, ``2 trajectories``."""
    return f"{trajectories} trajector{'y' if trajectories == 1 else 'ies'}"


def explain_empty(samples: Samples, filters: Mapping[str, Any]) -> str:
    """The reason of an empty result: the filters, and the content of the file."""
    content = samples.recorded()
    if not content.trajectories:
        return f"no trajectory is recorded yet{_dropped_note(content.dropped)}"
    steps = "no step" if content.first_step is None else f"steps {content.first_step} to {content.last_step}"
    after = f", evaluations after step {format_numbers(content.evaluations)}" if content.evaluations else ""
    conditions = ", ".join(
        f"{name}={str(value).lower() if value in (True, False) else value}"
        for name, value in filters.items()
        if value is not None
    )
    recorded = f"recorded are {steps}{after}{_dropped_note(content.dropped)}"
    return f"none of {_count_of(content.trajectories)} fits {conditions}; {recorded}"


def as_object(trajectory: RecordedTrajectory, *, tokens: bool) -> dict[str, Any]:
    """A trajectory as plain data. ``tokens``: with the ids and log-probabilities."""
    turns = [turn._asdict() for turn in trajectory.turns]
    for turn in turns:
        if not tokens:
            turn["tokens"] = len(turn["tokens"])
            del turn["logprobs"], turn["trainer_logprobs"]
    return {
        "step": trajectory.step,
        "evaluation": trajectory.evaluation,
        "query": trajectory.query.id,
        "text": trajectory.query.text,
        "trajectory": trajectory.number,
        "rewards": trajectory.rewards,
        "metrics": trajectory.metrics,
        "failure": trajectory.failure,
        "turns": turns,
        "metadata": trajectory.metadata,
        "programs": [program._asdict() for program in trajectory.programs],
    }


def _dropped_note(trajectories: int) -> str:
    return f" ({trajectories} could not be recorded)" if trajectories else ""


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _console() -> Terminal:
    console = Terminal(highlight=False)
    if not console.is_terminal:
        console.width = _PIPED_WIDTH
    return console


class TokenTexts:
    """The text of single tokens, by the tokenizer of each agent's policy. ``problems``: of tokenizers that could not be
    loaded, by name; their tokens are shown as numbers."""

    def __init__(self, run: Path) -> None:
        """Raises ConfigError if the run's config can't be read."""
        directory = RunDirectory.recorded(run)
        config = check(read_yaml(directory.config), str(directory.config))
        self._tokenizer_of = {
            str(name): config.policies[agent.policy].tokenizer for name, agent in config.agents.items()
        }
        self._decoders: dict[str, Callable[[int], str]] = {}
        self.problems: dict[str, str] = {}

    def __call__(self, turn: RecordedTurn) -> Sequence[str]:
        name = self._tokenizer_of.get(turn.agent, "")
        if name not in self._decoders:
            self._decoders[name] = self._decoder(name)
        return [*map(self._decoders[name], turn.tokens)]

    def _decoder(self, name: str) -> Callable[[int], str]:
        if name == "bytes":  # of simulated policies
            return lambda token: chr(token) if 0 <= token < 0x110000 else f"<{token}>"
        if (file := Path(name) / "tokenizer.json").is_file():
            return _decoder_of(file)
        try:
            from transformers import AutoTokenizer  # imported here: it takes seconds

            tokenizer: Any = AutoTokenizer.from_pretrained(name)
        except (OSError, ValueError, ImportError) as error:
            self.problems[name] = str(error)
            return lambda token: f"<{token}>"
        return lambda token: str(tokenizer.decode([token]))


def _decoder_of(file: Path) -> Callable[[int], str]:
    """Decodes single tokens without transformers, whose import takes half a minute on a busy machine."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(file))
    return lambda token: str(tokenizer.decode([token], skip_special_tokens=False))

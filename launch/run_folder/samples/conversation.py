"""Recorded trajectories as conversations for people, in colour where the terminal has some."""

import math
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any, Final, Literal, NamedTuple

from rich.console import Console
from rich.rule import Rule
from rich.text import Text

from ....actors.recorded_trajectory import PromptPart, RecordedProgram, RecordedTrajectory, RecordedTurn
from ....core.base.texts import printable

Pieces = Callable[[RecordedTurn], Sequence[str]]
"""The text of each of a turn's tokens."""

Shade = Literal["probability", "difference"]
"""The figure of a token that its colour shows: its probability, or the difference between trainer and engine."""

LEAST_DIFFERENCE: Final = 1e-3
"""A difference of log-probabilities that no colour shows. Every tenfold has a third of the scale, up to 1."""

_COLOURS: Final = ("cyan", "magenta", "green", "yellow", "blue", "red")


class Difference(NamedTuple):
    """The absolute differences between the log-probabilities of a turn's tokens by trainer and engine: their mean, the
    greatest one and its place."""

    mean: float
    most: float
    place: int


def difference_of(turn: RecordedTurn) -> Difference | None:
    """None if the trainer's log-probabilities are not recorded, or none of them is a number."""
    differences = {
        place: abs(difference)
        for place, difference in enumerate(differences_of(turn))
        if math.isfinite(difference)
    }
    if not differences:
        return None
    place = max(differences, key=differences.__getitem__)
    return Difference(fmean(differences.values()), differences[place], place)


def differences_of(turn: RecordedTurn) -> list[float]:
    """Trainer minus engine, of each token; empty if the trainer's are not recorded."""
    if not turn.trainer_logprobs:
        return []
    return [trainer - engine for trainer, engine in zip(turn.trainer_logprobs, turn.logprobs, strict=True)]


def show(
    console: Console,
    trajectory: RecordedTrajectory,
    pieces: Pieces | None = None,
    shade: Shade = "probability",
) -> None:
    """``pieces``: the tokens are shown, on a redder ground the less probable they were, or the more trainer and engine
    differ; without colours each with its log-probability, or the difference."""
    console.print(Rule(Text(title_of(trajectory), style="bold"), align="left", characters="─"))
    if trajectory.metrics:
        console.print(Text(_figures(trajectory.metrics), style="dim"))
    for name, value in sorted(trajectory.metadata.items()):
        console.print(Text(f"{printable(name)}: {_short(value)}", style="dim"), soft_wrap=True)
    branches = branches_of(trajectory.turns)
    colours: dict[str, str] = {}
    for turn in trajectory.turns:
        colour = colours.setdefault(turn.agent, _COLOURS[len(colours) % len(_COLOURS)])
        for part in turn.prompt:
            console.print(_prompt(part, is_branch=turn.number in branches), soft_wrap=True)
        said = Text(f"{turn.agent}  ", style=f"bold {colour}")
        said.append(facts_of(turn), style="dim not bold")
        console.print(said, soft_wrap=True)
        coloured = console.color_system is not None
        console.print(_answer(turn, pieces, shade, coloured=coloured), soft_wrap=True)
    for program in trajectory.programs:
        console.print(_program(program), soft_wrap=True)
    if trajectory.failure:
        console.print(Text(f"failed: {printable(trajectory.failure)}", style="bold red"), soft_wrap=True)
    console.print()


def _program(program: RecordedProgram) -> Text:
    end = program.problem or f"status {program.status}"
    shown = Text(f"program {printable(program.command)}", style="bold")
    shown.append(f"  {end} · {program.seconds:.1f} s", style="dim not bold")
    if output := program.output.strip():
        shown.append(f"\n{_indent(output)}", style="dim not bold")
    return shown


def title_of(trajectory: RecordedTrajectory) -> str:
    """Step, query, number and rewards, in one line."""
    when = f"evaluation after step {trajectory.step}" if trajectory.evaluation else f"step {trajectory.step}"
    rewards = _figures(trajectory.rewards) if trajectory.rewards else "no reward"
    return f"{when} · query {printable(trajectory.query.id)} · trajectory {trajectory.number} · {rewards}"


def _figures(by_name: Any) -> str:
    return ", ".join(f"{printable(name)} {value:.4g}" for name, value in by_name.items())


def facts_of(turn: RecordedTurn) -> str:
    """Number, reward, advantage, version, tokens and columns, in one line."""
    facts = [f"turn {turn.number}"]
    if turn.reward is not None:
        facts.append(f"reward {turn.reward:.4g}")
    if turn.advantage is not None:
        facts.append(f"advantage {turn.advantage:+.4g}")
    facts.append(f"version {'…'.join(map(str, sorted({turn.version, *turn.version_changes[1::2]})))}")
    tokens = f"{len(turn.tokens)} tokens"
    if turn.logprobs:
        tokens += f", mean log-prob {math.fsum(turn.logprobs) / len(turn.logprobs):.3g}"
    facts.append(tokens)
    if (difference := difference_of(turn)) is not None:
        late = f" (version {turn.trainer_version})" if turn.trainer_version != turn.version else ""
        facts.append(f"trainer{late} differs by {difference.mean:.2g} a token, {difference.most:.2g} at most")
    if turn.left_out:
        facts.append("not trained")
    if turn.finish_reason == "length":
        facts.append("cut off at max_new_tokens")
    facts += [f"{name}={_short(value)}" for name, value in turn.columns.items()]
    return " · ".join(facts)


def _short(value: Any) -> str:
    text = printable(str(value))
    return text if len(text) <= 60 else f"{text[:60]}..."


def branches_of(turns: Sequence[RecordedTurn]) -> set[int]:
    """The numbers of turns that continue a turn which another one has continued before."""
    continued: set[int] = set()
    branches: set[int] = set()
    for turn in turns:
        parents = {part for part in turn.prompt if isinstance(part, int)}
        if parents & continued:
            branches.add(turn.number)
        continued |= parents
    return branches


def _prompt(part: PromptPart, *, is_branch: bool = False) -> Text:
    if isinstance(part, int):
        return Text(f"  ↑ {name_conversation(part, is_branch=is_branch)}", style="dim italic")
    if isinstance(part, str):
        return Text(_indent(part), style="dim")
    said = Text(f"  {part.get('role', '?')}: ", style="dim bold")
    said.append(_indent(str(part.get("content") or "")).lstrip(), style="dim not bold")
    for call in part.get("tool_calls") or ():
        said.append(f"\n  calls {call_text(call)}", style="dim not bold")
    return said


def name_conversation(turn: int, *, is_branch: bool) -> str:
    """Names the conversation that a turn continues."""
    return f"the conversation of turn {turn}{', once more: a branch' if is_branch else ''}"


def call_text(call: Any) -> str:
    """A call of a tool: ``add({"a": 1})``."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return _short(call)
    return _short(f"{function.get('name')}({function.get('arguments', '')})")


def _indent(text: str) -> str:
    return "\n".join(f"  {line}" for line in printable(text).split("\n"))


def _answer(turn: RecordedTurn, pieces: Pieces | None, shade: Shade, *, coloured: bool) -> Text:
    figures = turn.logprobs if shade == "probability" else differences_of(turn)
    if pieces is None or not figures:  # an endpoint gives none, and the trainer does not compute all
        return Text(_indent(turn.text))
    text = Text("  ")
    for piece, figure in zip(pieces(turn), figures, strict=True):
        shown = printable(piece) or "∅"
        if coloured:
            text.append(shown, style=style_of(figure, shade))
        elif shade == "probability":
            text.append(f"{shown}[{figure:.2f}] ")
        else:
            text.append(f"{shown}[{figure:+.1g}] ")
    return text


def style_of(figure: float, shade: Shade) -> str:
    """The style of a token: plain if it was certain, or if trainer and engine agree."""
    if shade == "probability":
        redness = 1.0 - math.exp(min(0.0, figure))
    else:
        redness = min(1.0, math.log10(max(LEAST_DIFFERENCE, abs(figure)) / LEAST_DIFFERENCE) / 3)
    if not redness >= 0.05:
        return ""
    rest = round(225 * (1.0 - redness))
    return f"black on rgb(255,{rest + 30},{rest + 30})"

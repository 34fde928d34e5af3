"""The command ``flexmarl submit``.

RUN is the folder of a run, or an address file of it: ``runs/NAME/address``, or one that ``flexmarl admit`` has written.
With such a file the command works from every host that reaches the run.
"""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import click

from ...actors.errors import QueriesRefused
from ..monitoring.console.echo import echo, echo_json
from ..run.connected_run import query_run
from .options import RUN, FilePath, as_json_option


@click.command()
@click.argument("run", type=RUN)
@click.argument("file", type=FilePath(exists=True, dir_okay=False))
@as_json_option
def submit(run: Path, file: Path, as_json: bool) -> int:
    """Have a running run train the trajectories of FILE, a log of answers that ended before: one JSON object a line.
    It waits until all of them are in the run's store, or are dropped.

    \b
    A line:
      {"agent": "solver", "prompt": "2+2=", "answer": "4", "logprobs": [-0.1, -0.2], "reward": 1.0, "query": "sum-17"}

    \b
    Examples:
      flexmarl submit runs/first monday.jsonl
      flexmarl submit service.address monday.jsonl --json
    """
    lines = _lines_of(file)
    answers = query_run(run, lambda connected: connected.submit_logged(lines))
    trained = [answer for answer in answers if not answer.dropped]
    reasons = Counter(answer.dropped for answer in answers if answer.dropped)
    if as_json:
        echo_json(
            {
                "trained": {answer.query: answer.step for answer in trained},
                "dropped": {answer.query: answer.dropped for answer in answers if answer.dropped},
            }
        )
    else:
        echo(f"{len(trained)} of {len(answers)} groups are trained")
        for reason, count in reasons.items():
            echo(f"{count} dropped: {reason}")
    return 0


def _lines_of(file: Path) -> list[dict[str, Any]]:
    """The objects of the file. Raises QueriesRefused, with the number of the line."""
    lines = []
    for number, text in enumerate(file.read_text(encoding="utf-8").split("\n"), 1):
        if not text.strip():
            continue
        try:
            line = json.loads(text)
        except ValueError as error:
            raise QueriesRefused(f"{file}, line {number}: it is not JSON: {error}") from None
        if not isinstance(line, dict):
            raise QueriesRefused(f"{file}, line {number}: it needs an object with agent, prompt, answer, ...")
        lines.append(line)
    return lines

"""A display of a run, and the metrics of its steps."""

import io
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rich.console import Console

from flexmarl.actors.figures import Numbers
from flexmarl.actors.names import AgentName, PolicyName, Step, Version
from flexmarl.actors.step_metrics import StepMetrics
from flexmarl.launch.monitoring.console.progress import Detail, Progress

SORTER, CHECKER = AgentName("sorter"), AgentName("checker")
ESCAPE = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


def metrics(step: int, **more: Any) -> StepMetrics:
    """``by_policy``: see ``policy``."""
    plain = StepMetrics(Step(step), 0.07 * step, 0.07, 0.05, 1024, 14400.0)
    policies = more.pop("by_policy", {})
    versions = {name: version for name, (version, _) in policies.items()}
    by_policy = {name: figures for name, (_, figures) in policies.items()}
    return replace(plain, versions=versions, by_policy=by_policy, **more)


def policy(version: int, **figures: float) -> tuple[Version, Numbers]:
    return Version(version), dict(figures)


class Stage:
    """A progress display on a fake screen with a clock that is moved by hand."""

    def __init__(
        self,
        *,
        terminal: bool,
        width: int = 100,
        agents: tuple[str, ...] = ("sorter", "checker"),
        policy_of: Mapping[str, str] | None = None,
        first_step: int = 0,
        total_steps: int = 400,
        detail: Detail = "normal",
    ) -> None:
        self.now_s = 100.0
        self.out = io.StringIO()
        self.console = Console(
            file=self.out,
            force_terminal=terminal,
            width=width,
            height=40,
            _environ={"TERM": "xterm-256color"},
        )
        self.progress = Progress(
            self.console,
            run_name="sorting",
            mode="strict",
            total_steps=total_steps,
            agents={AgentName(name): PolicyName((policy_of or {}).get(name, name)) for name in agents},
            first_step=first_step,
            detail=detail,
            clock=lambda: self.now_s,
        )

    def step(self, step: int, **more: Any) -> None:
        plain = {
            "overlap_s": 0.012,
            "by_agent": {SORTER: {"reward": 0.5}, CHECKER: {"reward": 0.25}},
            "by_policy": {PolicyName("sorter"): policy(step)},
        }
        self.progress.step(metrics(step, **{**plain, **more}))

    @property
    def text(self) -> str:
        return ESCAPE.sub("", self.out.getvalue())

    @property
    def lines(self) -> list[str]:
        return self.text.splitlines()

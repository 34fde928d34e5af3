"""Writes to Weights & Biases, online or into a folder that ``wandb sync`` uploads later."""

import secrets
from typing import TYPE_CHECKING, Literal

from ....actors.errors import ConfigError
from .sink import Figures, Sink, SinkRun

if TYPE_CHECKING:
    import wandb

WandbMode = Literal["online", "offline"]


class WandbSink(Sink):
    """A resumed run continues the run of Weights & Biases, whose steps can't be replaced."""

    appends_only = True

    def __init__(self, mode: WandbMode, project: str, entity: str | None, group: str | None) -> None:
        self._mode: WandbMode = mode
        self._project, self._entity, self._group = project, entity, group
        self._run: wandb.Run | None = None

    def open(self, run: SinkRun, series: str) -> tuple[str, str]:
        import wandb

        # ``wandb.init`` would ask on the terminal.
        if self._mode == "online" and not wandb.login(prompt=False, verify=False):
            raise ConfigError("not logged in: run wandb login, set WANDB_API_KEY, or write mode: offline")
        series = series or secrets.token_hex(8)
        # No capture of the console, no handlers, no figures of the machine: the process is not this sink's.
        quiet = wandb.Settings(
            console="off", silent=True, disable_git=True, disable_code=True, x_disable_stats=True
        )
        self._run = wandb.init(
            project=self._project,
            entity=self._entity,
            group=self._group,
            id=series,
            name=run.name,
            dir=str(run.folder),
            config=dict(run.config),
            mode=self._mode,
            resume="allow",
            reinit="create_new",
            settings=quiet,
        )
        if self._mode == "online":
            return series, self._run.url or ""
        return series, f"wandb sync --append {self._run.dir.removesuffix('/files')}"

    def write(self, figures: Figures) -> None:
        assert self._run is not None, "it was opened"
        self._run.log(dict(figures.figures), step=figures.step)

    def close(self, failed: bool) -> None:
        assert self._run is not None, "it was opened"
        self._run.finish(exit_code=int(failed))

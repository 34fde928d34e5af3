"""The evaluations behind Shapley values, as runs in one folder: one for each coalition, and the question they answer.

credit.json        the run, the weights of agents that are taken out, the settings: another question is refused
none/, solver/, solver+checker/, ...   the evaluation of each coalition, a run without steps
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from ...actors.errors import ConfigError
from ...core.durable.files import draft_of
from ..config.evaluation_config import evaluation_config
from ..errors import RunDirectoryError
from ..run.prepared_run import PreparedRun, new_run
from ..run_folder.run_directory import RunDirectory
from ..run_folder.run_removal import remove_run
from ..run_folder.stored_run import read_run
from .coalition_config import coalition_config, players
from .shapley import Coalition, Order, coalitions_of

_QUESTION: Final = "credit.json"
_NO_AGENT: Final = "none"


class CreditRun:
    """``run``: its newest checkpoint is taken. ``without``: weights of agents that are taken out; None: the
    run's before training. ``agents``: whose weights differ between the two."""

    def __init__(self, run: Path, without: Path | None, settings: Sequence[str], repeats: int | None) -> None:
        """Raises ConfigError, RunDirectoryError."""
        if run.name.isdecimal() and not (run / "config.yaml").exists():
            raise ConfigError(f"{run}: name the run, whose newest checkpoint is taken")
        self._trained = evaluation_config(run, None, [*settings], repeats)
        self._before = self._with_weights_of(run, without, settings, repeats)
        self.agents = players(self._trained, self._before)
        if not self.agents:
            raise ConfigError(f"{without or run / '0'} has the same weights as {run}: no agent differs")
        # Not the run's name alone: its newest checkpoint may be another one tomorrow, and a value must not mix two.
        self._question: dict[str, Any] = {
            name: config.model_dump(mode="json")
            for name, config in (("trained", self._trained), ("before", self._before))
        }

    @staticmethod
    def _with_weights_of(
        run: Path, without: Path | None, settings: Sequence[str], repeats: int | None
    ) -> Any:
        try:
            return evaluation_config(run, None, [*settings], repeats, weights=without or run / "0")
        except (ConfigError, RunDirectoryError) as error:
            hint = "" if without else "; --without names the weights of agents that are taken out"
            raise ConfigError(f"{error}{hint}") from None

    def prepare(self, orders: Sequence[Order], folder: Path) -> list[Coalition]:
        """The coalitions to be evaluated. Makes the folder. Raises ConfigError if it has another question's
        evaluations, OSError."""
        file = folder / _QUESTION
        if file.exists():
            if json.loads(file.read_text()) != self._question:
                raise ConfigError(
                    f"{folder} has evaluations of another run or of other settings: choose another --name"
                )
        elif folder.exists() and any(folder.iterdir()):
            raise ConfigError(f"{folder} was not made by flexmarl credit: choose another --name")
        else:
            folder.mkdir(parents=True, exist_ok=True)
            with draft_of(file) as draft:
                draft.write_text(json.dumps(self._question))
        return coalitions_of(orders)

    def name_of(self, coalition: Coalition) -> str:
        """The name of the coalition's evaluation."""
        return "+".join(agent for agent in self.agents if agent in coalition) or _NO_AGENT

    @contextmanager
    def evaluation(self, coalition: Coalition, folder: Path) -> Iterator[PreparedRun | None]:
        """The coalition's evaluation, ready to run; None if it is complete. One that was not, begins again."""
        name = self.name_of(coalition)
        if (folder / name).exists():
            if read_run(folder / name).state == "done":
                yield None
                return
            remove_run(RunDirectory.existing(folder / name))
        config = coalition_config(self._trained, self._before, coalition)
        with new_run(config, (), folder, name, lambda _: None) as prepared:
            yield prepared

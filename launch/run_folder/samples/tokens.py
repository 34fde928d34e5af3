"""The text of single tokens, by the tokenizer of each agent's policy."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ....actors.recorded_trajectory import RecordedTurn
from ...config.config_reading import check, read_yaml
from ..run_directory import RunDirectory


class TokenTexts:
    """``problems``: of tokenizers that could not be loaded, by name; their tokens are shown as numbers."""

    def __init__(self, run: Path) -> None:
        """Raises ConfigError if the run's config can't be read."""
        directory = RunDirectory.existing(run)
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
        try:
            from transformers import AutoTokenizer  # imported here: it takes seconds

            tokenizer: Any = AutoTokenizer.from_pretrained(name)
        except (OSError, ValueError, ImportError) as error:
            self.problems[name] = str(error)
            return lambda token: f"<{token}>"
        return lambda token: str(tokenizer.decode([token]))

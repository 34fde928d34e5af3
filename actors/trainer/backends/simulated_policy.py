"""A policy without a model: training takes a configured time, and is recorded sample by sample.

For measurements and tests of everything around training. The state is two numbers, the version and a digest of all
trained samples: a sum over the samples of a step, the same for any order and any micro-batches, chained from step to
step. Two runs that trained the same samples in the same steps have the same losses, bit by bit.
"""

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import xxhash
from pydantic import ConfigDict, TypeAdapter
from typing_extensions import TypedDict

from ...errors import CheckpointMismatch, StaleSample
from ...json_files import read_json, write_json
from ...messages import NO_GANG, GangPlace, Sample, StepStats
from ..shards import Shard, shard_of, whole
from .backend_config import SimulatedTrainerConfig
from .policy_backend import MicroBatchStats, PolicyBackend, TrainingStep

STATE_FILE = "simulated_policy.json"
STATE_ROWS: Final = 720_720
"""Rows of the tensors that ranks divide, a byte each, if moves take time: any number of ranks up to 16 divides it."""


def micro_batch_s(config: SimulatedTrainerConfig, samples: Iterable[Sample], ranks: int) -> float:
    """Seconds of forward and backward of one micro-batch, whose tokens the ``ranks`` of the gang share."""
    lengths = [len(sample.prompt_tokens) + len(sample.tokens) for sample in samples]
    if config.times:
        return config.times_on(ranks).micro_batch_s(lengths, ranks)
    return config.micro_batch_s + config.token_s * sum(lengths) / ranks


class _Position(TypedDict):
    __pydantic_config__ = ConfigDict(extra="forbid")  # type: ignore[misc]
    trained: dict[int, list[str]]
    tokens: int
    accumulated: list[str]


_POSITION = TypeAdapter(_Position)


class SimulatedPolicy(PolicyBackend):
    """A policy that computes nothing, and takes the time of it.

    ``trained``: ids of all trained samples, sorted, by the version before the optimizer step. They are saved and loaded
    with the policy, so that after any crash they are the samples that its weights stand for.
    """

    def __init__(
        self,
        name: str,
        config: SimulatedTrainerConfig,
        *,
        seed: int,
        sleep: Callable[[float], None],
        max_staleness: int = 0,
        meet: Callable[[int], None] | None = None,
        place: GangPlace = NO_GANG,
    ) -> None:
        """``sleep`` is called with the seconds of each computation, before its result is used. ``max_staleness``: the
        most versions that a sample may be older than the policy. ``meet``: of a rank that has others, called within
        each computation, with a digest of all that is trained. ``place``: of this rank."""
        self.name = name
        self.trained: dict[int, list[str]] = {}
        self._config = config
        self._sleep = sleep
        self._meet = meet
        self._max_staleness = max_staleness
        self._state = np.array([0, xxhash.xxh3_64_intdigest(f"{seed}/{name}".encode())], np.uint64)
        self._gradient = np.zeros(1, np.uint64)
        self._ranks = place.size
        parts = place.size // place.replicas
        self._part = shard_of((STATE_ROWS,), place.rank % parts, parts)
        self._rows, self._gradient_rows = (
            {name: np.zeros(self._part.own_shape, np.uint8)} if config.times else {}
            for name in ("rows", "gradient_rows")
        )
        self._tokens = 0
        self._accumulated: list[str] = []

    @property
    def version(self) -> int:
        """Optimizer steps so far."""
        return int(self._state[0])

    @property
    def _digest(self) -> int:
        return int(self._state[1])

    def sft(self, examples: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]) -> float:
        if self.version or self._accumulated:
            raise RuntimeError(f"policy {self.name}: SFT after reinforcement learning has begun")
        self._sleep(self._config.token_s * sum(len(prompt) + len(answer) for prompt, answer in examples))
        self._state[1] = _mix(self._digest, repr(examples))
        return self._loss()

    def sft_done(self) -> None:
        """See ``PolicyBackend.sft_done``: there are no moments to forget."""

    def accumulate(self, batch: Sequence[Sample]) -> MicroBatchStats:
        for sample in batch:
            if not 0 <= self.version - sample.policy_version <= self._max_staleness:
                raise StaleSample(sample.sample_id, sample.policy_version, self.name, self.version)
            if not len(sample.tokens) == len(sample.logprobs) > 0:
                raise ValueError(f"sample {sample.sample_id}: needs tokens, and a log-probability for each")
        seconds = micro_batch_s(self._config, batch, self._ranks)
        self._sleep(seconds)
        tokens = sum(len(sample.tokens) for sample in batch)
        self._tokens += tokens
        for sample in batch:
            self._accumulated.append(sample.sample_id)
            content = (sample.sample_id, sample.tokens, sample.reward, sorted(set(sample.logprobs)))
            self._gradient += np.uint64(_mix(0, repr(content)))  # wraps around
        self._meet_others()
        nonzero_advantage = sum(sample.advantage != 0.0 for sample in batch)
        return MicroBatchStats(len(batch), tokens, nonzero_advantage, seconds)

    def optimizer_step(self, run_step: int | None = None) -> StepStats:
        """See ``PolicyBackend.optimizer_step``. The loss is a number in [0, 1) drawn from all that was trained.
        There is no schedule."""
        config = self._config
        self._sleep(config.times_on(self._ranks).optimizer_s if config.times else config.optimizer_s)
        self._meet_others()
        samples, tokens = len(self._accumulated), self._tokens
        self.trained[self.version] = sorted(self._accumulated)
        self._state[:] = self.version + 1, _mix(self._digest, str(self._gradient[0]))
        self._forget_gradient()
        figures = {"loss": self._loss(), "grad_norm": 1.0, "lr": 0.0, "skipped_updates": 0}
        return StepStats(samples, tokens, {**figures, "clip_fraction": 0.0, "ratio_deviation": 0.0})

    def weights(self) -> dict[str, np.ndarray[Any, Any]]:
        """``state``: int64 ``[2]``, the version and the digest (without its sign bit)."""
        return self.weights_outline()

    def live_weights(self) -> dict[str, np.ndarray[Any, Any]]:
        return {}

    def weights_outline(self) -> dict[str, np.ndarray[Any, Any]]:
        return {"state": np.array([self.version, self._digest >> 1], np.int64)}

    def gather_weights(self, into: Mapping[str, np.ndarray[Any, Any]]) -> None:
        into["state"][:] = self.weights()["state"]

    def base_state(self) -> dict[str, np.ndarray[Any, Any]]:
        """``state``: uint64 ``[2]``, the version and the digest. ``rows``: uint8, this rank's part of ``STATE_ROWS``,
        if moves take time."""
        return {"state": self._state, **self._rows}

    def frozen_state(self) -> dict[str, Any]:
        return {}

    def parts(self) -> dict[str, Shard]:
        """All of ``state`` and ``gradient``, a part of the rows: as much of it as of a real state."""
        rows = dict.fromkeys((*self._rows, *self._gradient_rows), self._part)
        return {"state": whole((2,)), "gradient": whole((1,)), **rows}

    def step_state(self) -> TrainingStep:
        """See ``PolicyBackend.step_state``: ``gradient`` is uint64 ``[1]``."""
        tensors = self.gradients() if self._accumulated else {}
        data = {"trained": self.trained, "tokens": self._tokens, "accumulated": self._accumulated}
        return TrainingStep(tensors, copy.deepcopy(data))

    def gradients(self) -> dict[str, np.ndarray[Any, Any]]:
        return {"gradient": self._gradient, **self._gradient_rows}

    def load_state(self, step: TrainingStep) -> None:
        position = _POSITION.validate_python(step.data)
        if step.tensors.keys() != (self.gradients().keys() if position["accumulated"] else set()):
            raise ValueError(f"tensors of the step: {', '.join(step.tensors) or 'none'}")
        self._gradient[:] = step.tensors.get("gradient", 0)  # perhaps itself: see ``gradients``
        self.trained, self._tokens = position["trained"], position["tokens"]
        self._accumulated = position["accumulated"]

    def save(self, folder: Path, tokenizer: Any) -> None:
        """See ``PolicyBackend.save``: ``simulated_policy.json`` alone, with ``trained`` in it."""
        if self._config.times:
            self._sleep(self._config.times_on(self._ranks).save_s)
        folder.mkdir(parents=True, exist_ok=True)
        trained = {str(version): ids for version, ids in self.trained.items()}
        state = {"version": self.version, "digest": self._digest, "trained": trained}
        write_json(folder / STATE_FILE, state)

    def start_from(self, folder: Path) -> None:
        self._state[1] = _read_state(folder)[1]

    def load(self, folder: Path) -> None:
        version, digest, self.trained = _read_state(folder)
        self._state[:] = version, digest
        self._forget_gradient()

    def _meet_others(self) -> None:
        if self._meet is not None:
            self._meet(_mix(self._digest, str(self._gradient[0])))

    def _forget_gradient(self) -> None:
        self._gradient[:] = self._tokens = 0
        self._accumulated = []

    def _loss(self) -> float:
        return (self._digest >> 11) / 2**53


def _read_state(folder: Path) -> tuple[int, int, dict[int, list[str]]]:
    """Version, digest and the trained samples by version. Raises CheckpointIncomplete, CheckpointMismatch."""
    state = read_json(folder / STATE_FILE)
    version, digest, trained = state.get("version"), state.get("digest"), state.get("trained")
    if not (isinstance(version, int) and isinstance(digest, int) and isinstance(trained, dict)):
        raise CheckpointMismatch(
            folder / STATE_FILE, "state", "version, digest and trained", str(list(state))
        )
    return version, digest, {int(step): list(ids) for step, ids in trained.items()}


def _mix(digest: int, text: str) -> int:
    return xxhash.xxh3_64_intdigest(text.encode(), digest)

"""The tokens whose log-probabilities a policy's forwards compare with the engine's, for the record of the run."""

from collections.abc import Sequence
from itertools import compress

import torch
from torch import Tensor

from .....core.spans import is_kept
from ....compared_logprobs import Compared
from ....messages import Sample
from ....sample_id import SampleId


class ComparedTokens:
    """Keeps the differences of a share of all queries, the same ones in each rank, until they are taken. They stay on
    the device until the sums of a call are read: no wait of their own."""

    def __init__(self, share: float) -> None:
        """``share``: of the queries."""
        self._share = share
        self._sample_ids: list[str] = []
        self._sizes: list[int] = []
        self._on_device: list[Tensor] = []
        self._read: dict[str, Compared] = {}

    def note(self, samples: Sequence[Sample], logprobs: Tensor, engine_logprobs: Tensor) -> None:
        """The tokens of one forward, ``[N]`` both: by the trainer's policy at the step's begin, and by the engine.
        ``samples``: in the order of their tokens."""
        if not self._share:
            return
        differences = (logprobs.detach() - engine_logprobs).half()
        sizes = [len(sample.tokens) for sample in samples]
        if self._share < 1.0:
            kept = [is_kept(SampleId.parse(sample.sample_id).query, self._share) for sample in samples]
            parts = [*compress(torch.split(differences, sizes), kept)]
            if not parts:
                return
            differences, sizes = torch.cat(parts), [*compress(sizes, kept)]
            samples = [*compress(samples, kept)]
        self._sample_ids += [sample.sample_id for sample in samples]
        self._sizes += sizes
        self._on_device.append(differences)

    def read(self, version: int) -> None:
        """Copies what was noted to the host, at once. To be called when the device has computed the rest. ``version``:
        of the policy."""
        if not self._on_device:
            return
        # Cut as an array: a tensor for each sample would take as long as all the rest.
        values, begin = torch.cat(self._on_device).cpu().numpy(), 0
        for sample_id, size in zip(self._sample_ids, self._sizes, strict=True):
            self._read[sample_id] = Compared(version, values[begin : begin + size])
            begin += size
        self._sample_ids, self._sizes, self._on_device = [], [], []

    def take(self) -> dict[str, Compared]:
        """Returns the samples that were read since the last call, by their id."""
        samples, self._read = self._read, {}
        return samples

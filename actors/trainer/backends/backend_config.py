"""The trainer's backend of a policy: one class for each, chosen by ``name``. No backend is imported here."""

from collections.abc import Iterable
from typing import Annotated, Literal, Self

from pydantic import Tag, model_validator

from ...config_base import AUTO, AutoCount, Config, Count, Natural, NonNegative, Unit, chosen_by_name
from .trainer_times import TrainerTimes


class _Ranks(Config):
    """The processes that a policy is divided over."""

    ranks: Annotated[AutoCount, Unit("processes")] = 1
    """Processes that the policy is divided over (with `torch`, by FSDP2). More than one need a pool. `auto`: the fewest
    that fit the GPUs, by [the plan](gpus.md#ranks-and-slots-by-the-plan); 1 on CPUs."""
    min_ranks: Annotated[Count, Unit("slots")] | None = None
    """The fewest slots that the policy has in a shared pool, where its share of the slots decides. `null`: always
    `ranks`."""
    replicas: Annotated[Count, Unit("replicas")] = 1
    """Groups of equally many ranks that each have the whole policy, divided within the group (hybrid sharding). Weights
    are gathered within a group, which lies on one host, and gradients summed over all, once for a micro-batch: see
    [Replicas](gpus.md#replicas)."""

    @property
    def most_ranks(self) -> int:
        """``ranks``, once the plan has chosen them."""
        assert isinstance(self.ranks, int), "ranks=auto is replaced before a run starts"
        return self.ranks

    @property
    def fewest_ranks(self) -> int:
        return self.most_ranks if self.min_ranks is None else self.min_ranks

    @property
    def replica_size(self) -> int:
        """The ranks of a replica."""
        return self.most_ranks // self.replicas

    @property
    def fewest_parts(self) -> int:
        """The fewest parts that the policy's state is ever divided into: a replica has all of them."""
        return min(self.fewest_ranks, self.replica_size)

    def replicas_of(self, ranks: int) -> int:
        """The replicas of a gang of ``ranks``, which may be fewer than all: 1 if they can't have ``replica_size`` each,
        so that no rank has more of the policy than in a whole gang."""
        return 1 if ranks % self.replica_size else ranks // self.replica_size

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.ranks != AUTO and self.fewest_ranks > self.most_ranks:
            raise ValueError(f"min_ranks={self.min_ranks} is more than ranks={self.ranks}")
        if self.ranks != AUTO and self.ranks % self.replicas:
            raise ValueError(
                f"replicas={self.replicas} do not divide ranks={self.ranks}: each needs as many ranks as the others"
            )
        return self


class TorchTrainerConfig(_Ranks):
    """PyTorch."""

    name: Literal["torch"] = "torch"
    """`torch`, or `simulated`: takes time and computes nothing. All policies of a run have the same trainer."""
    tokens_per_forward: Annotated[Count, Unit("tokens")] = 16384
    """Most tokens of one forward and backward, padding included. The activations in memory grow with it."""
    packing: bool = True
    """`true`: the samples of a forward lie end to end, without padding; models that can't compute them so are named in
    the log, and get padded ones. `false`: samples of similar length are padded to the longest."""
    activation_checkpointing: bool = False
    """Computation of each layer's activations a second time, in the backward: they take the memory of one layer, and a
    step a third more time."""
    role_gradients_every: Annotated[Natural, Unit("steps")] = 0
    """Steps between two that measure the `gradient_share` of each agent of a shared policy; 0: none does. Such a step
    takes a copy of the gradient for each agent, and one more, in memory that no plan counts. For one rank."""
    compilation: bool | None = None
    """Compilation of layers and log-probabilities by `torch.compile`, on a GPU; Triton needs a C compiler there. It
    takes 20 to 40 s at the first step. `null`: models of at least 100 million parameters."""

    @model_validator(mode="after")
    def _measures_roles_on_one_rank(self) -> Self:
        if self.role_gradients_every and self.ranks != 1:
            raise ValueError(
                f"role_gradients_every={self.role_gradients_every} is for ranks=1, not for ranks={self.ranks}: it "
                "is not measured in a gang"
            )
        return self


class SimulatedTrainerConfig(_Ranks):
    """A trainer that takes time and computes nothing. Its times are those of one rank."""

    name: Literal["simulated"] = "simulated"
    token_s: Annotated[NonNegative, Unit("s")] = 0.0
    """Time of forward and backward for each token of prompt and answer; `ranks` share it."""
    micro_batch_s: Annotated[NonNegative, Unit("s")] = 0.0
    """Time of each micro-batch beside its tokens."""
    optimizer_s: Annotated[NonNegative, Unit("s")] = 0.0
    """Time of an optimizer step."""
    times: tuple[TrainerTimes, ...] = ()
    """Times of a policy on its devices, in place of `token_s`, `micro_batch_s` and `optimizer_s`: on `min_ranks` ranks,
    on one more, and so on up to `ranks`. `flexmarl simulate` sets them, and the time of moves."""
    process_group: bool = False
    """`true`: the ranks of a policy meet in a process group of PyTorch, as real ones do, and at each computation: for
    tests of lost ranks."""

    def times_on(self, ranks: int) -> TrainerTimes:
        """The times of a gang of ``ranks``; ``times`` are there."""
        return self.times[ranks - self.fewest_ranks]

    @model_validator(mode="after")
    def _has_numbers_of_its_gangs(self) -> Self:
        if self.ranks == AUTO:
            raise ValueError("ranks=auto: a simulated trainer has no memory to plan: write a number")
        sizes = self.most_ranks - self.fewest_ranks + 1
        if self.times and len(self.times) != sizes:
            raise ValueError(f"times has {len(self.times)} entries, and gangs have {sizes} sizes")
        return self


TrainerBackendConfig = Annotated[
    Annotated[TorchTrainerConfig, Tag("torch")] | Annotated[SimulatedTrainerConfig, Tag("simulated")],
    chosen_by_name("torch"),
]
"""The section ``trainer`` of a policy."""


def has_simulated_gangs(trainers: Iterable[TorchTrainerConfig | SimulatedTrainerConfig]) -> bool:
    """True if ranks of a simulated policy meet in process groups."""
    return any(isinstance(trainer, SimulatedTrainerConfig) and trainer.process_group for trainer in trainers)

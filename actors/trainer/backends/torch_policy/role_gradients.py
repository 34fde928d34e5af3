"""The gradient of each agent of a shared policy apart, in the steps that measure it.

    accumulated gradient ─ put aside ─> zero ─ backward of one agent's samples ─> its gradient ─ added to both

The sum is the step's own gradient, but for the order in which it is rounded; nothing is computed twice. It takes a copy
of the gradient for each agent, and one more while it computes.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ....figures import Numbers
from ....names import AgentName
from .adamw import Parameters, gradients


class RoleGradients:
    """Measures the steps whose number ``every`` divides; 0: none."""

    def __init__(self, agents: Sequence[AgentName], every: int) -> None:
        self._every = every if len(agents) > 1 else 0
        self._agents = agents
        self._gradients: dict[AgentName, dict[str, Tensor]] = {}
        self._samples = 0

    def measures(self, version: int) -> bool:
        """True if the step that a policy of this version takes next is measured."""
        return bool(self._every) and (version + 1) % self._every == 0

    @contextmanager
    def of_agent(self, agent: AgentName, samples: int, parameters: Parameters) -> Iterator[None]:
        """Adds the gradient that the body accumulates to the agent's. ``samples``: their number."""
        live = gradients(parameters)
        before = {name: gradient.clone() for name, gradient in live.items()}
        for gradient in live.values():
            gradient.zero_()
        apart = self._gradients.setdefault(agent, {})
        try:
            yield
            for name, gradient in gradients(parameters).items():
                apart[name] = apart[name] + gradient if name in apart else gradient.clone()
            self._samples += samples
        finally:  # also if the body raises: the step may be continued with the gradient that was there
            for name, gradient in gradients(parameters).items():
                if name in before:
                    # In place: the buffers of the gradient move with the policy's state.
                    gradient.add_(before[name])

    def forget(self) -> None:
        """Forgets the gradients of a step that is not continued here."""
        self._gradients, self._samples = {}, 0

    def take_shares(self, samples: int) -> Mapping[AgentName, Numbers]:
        """Each agent's part of the sum of the norms, once the step is complete, and forgets the gradients. Empty if not
        all of its ``samples`` were measured here, as in a step in which the policy has moved; and if all are 0."""
        whole, parts = self._samples == samples, self._gradients
        self.forget()
        norms = {
            agent: float(nn.utils.get_total_norm(parts[agent].values())) if parts.get(agent) else 0.0
            for agent in self._agents
        }
        total = sum(norms.values())
        if not whole or not 0.0 < total < torch.inf:
            return {}
        return {agent: {"gradient_share": norm / total} for agent, norm in norms.items()}

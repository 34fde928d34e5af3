"""All memory of a policy in training: its modules with their gradients and moments, and the files of them."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ....errors import CheckpointMismatch
from ....json_files import read_json, write_json
from ...policy_files import check_tensors, read_tensors_into, write_tensors
from ...saved_policy import CRITIC_FILE, POSITION_FILE, REFERENCE_FILE, STATE_FILE, WEIGHTS_FILE
from ...trainer_setup import PolicySetup
from .adamw import configure, drop_gradient, gradients, make_adamw, moments
from .completion_model import CompletionModel, named_weights
from .critic_model import CriticModel

FORMAT = 1


class TrainedModels:
    """``completions`` is the policy's model; ``reference`` and ``critic`` are there if the algorithm needs them.

    Policies that ``fit`` can use the same models one after the other.
    """

    def __init__(self, setup: PolicySetup, seed: int | None) -> None:
        """``seed`` is the policy's own; None leaves the weights unset, for a state to be loaded."""
        self._setup = setup
        model, loss = setup.real_model, setup.loss
        self.completions = CompletionModel(model, seed)
        self.reference = CompletionModel(model, seed) if loss.kl_coefficient else None
        if self.reference is not None:
            self.reference.model.requires_grad_(False)
        self.critic = CriticModel(self.completions, loss.critic, setup.optimizer) if loss.critic else None
        self.optimizer = make_adamw(self.completions.model, setup.optimizer)
        self._bfloat16 = model.dtype == "bfloat16"

    def fit(self, setup: PolicySetup) -> bool:
        """True if a policy of ``setup`` has the same tensors."""
        return _shape(setup) == _shape(self._setup)

    def take_settings(self, setup: PolicySetup) -> None:
        """The optimizers continue with the settings of ``setup``, which must ``fit``."""
        self._setup = setup
        configure(self.optimizer, setup.optimizer)
        if self.critic is not None and setup.loss.critic is not None:
            self.critic.take_settings(setup.loss.critic, setup.optimizer)

    def base_state(self) -> dict[str, Tensor]:
        """See ``PolicyBackend.base_state``: ``{file without its suffix}/{name in the file}``."""
        return {
            f"{Path(file).stem}/{name}": tensor
            for file, tensors in self.files().items()
            for name, tensor in tensors.items()
        }

    def gradients(self) -> dict[str, Tensor]:
        """The live gradients, ``gradient/{parameter}`` and ``critic_gradient/{parameter}``."""
        found = {f"gradient/{name}": each for name, each in gradients(self.completions.model).items()}
        if self.critic is not None:
            found |= {f"critic_gradient/{name}": g for name, g in gradients(self.critic.model).items()}
        return found

    def start_from_here(self) -> None:
        """Reinforcement learning starts from the present weights: so do reference and critic."""
        if self.reference is not None:
            self.reference.model.load_state_dict(self.completions.model.state_dict())
        if self.critic is not None:
            self.critic.start_from(self.completions)

    def drop_gradients(self) -> None:
        drop_gradient(self.optimizer)
        if self.critic is not None:
            self.critic.drop_gradient()

    def published(self) -> dict[str, Tensor]:
        """See ``PolicyBackend.weights``: state-dict tensors, detached, in the precision the model computes in.

        float32 ones are the live weights themselves, bfloat16 ones are copies.
        """
        weights = named_weights(self.completions.model)
        if not self._bfloat16:
            return weights
        return {k: v.to(torch.bfloat16) if v.is_floating_point() else v for k, v in weights.items()}

    # ----------------------------------------------------------------------- files

    def files(self) -> dict[str, Mapping[str, Tensor]]:
        """The live tensors of a saved policy, by the file that they are in."""
        model = self.completions.model
        files: dict[str, Mapping[str, Tensor]] = {
            WEIGHTS_FILE: named_weights(model),
            STATE_FILE: moments(model, self.optimizer),  # all that a bit-equal continuation needs
        }
        if self.reference is not None:
            files[REFERENCE_FILE] = named_weights(self.reference.model)
        if self.critic is not None:
            files[CRITIC_FILE] = self.critic.state()
        return files

    def save(self, folder: Path, tokenizer: PreTrainedTokenizerBase, version: int) -> None:
        """See ``PolicyBackend.save``. ``folder`` is created; the weights are written in float32."""
        model = self.completions.model
        folder.mkdir(parents=True, exist_ok=True)
        model.config.save_pretrained(folder)
        model.generation_config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        for name, tensors in self.files().items():
            write_tensors(folder / name, tensors)
        write_json(folder / POSITION_FILE, {"format": FORMAT, "version": version})

    def load(self, folder: Path) -> int:
        """See ``PolicyBackend.load``; returns the version."""
        version = _read_version(folder / POSITION_FILE)
        files = self.files()
        for name, tensors in files.items():
            check_tensors(folder / name, tensors)
        for name, tensors in files.items():
            read_tensors_into(folder / name, tensors)
        self.drop_gradients()
        return version

    def start_from(self, folder: Path) -> None:
        """See ``PolicyBackend.start_from``."""
        weights = named_weights(self.completions.model)
        check_tensors(folder / WEIGHTS_FILE, weights)
        read_tensors_into(folder / WEIGHTS_FILE, weights)
        self.start_from_here()


def copy_into(destination: Mapping[str, Tensor], source: Mapping[str, Tensor]) -> None:
    """Copies every tensor of ``source`` into that of the same name.

    Raises ``ValueError`` before anything is copied, which names the first difference of names, shapes or dtypes.
    """
    for name in sorted(destination.keys() | source.keys()):
        ours, given = (_outline(tensors.get(name)) for tensors in (destination, source))
        if ours != given:
            raise ValueError(f"tensor {name}: need {ours}, there is {given}")
    with torch.no_grad():
        for name, tensor in destination.items():
            tensor.copy_(source[name])


def _outline(tensor: Tensor | None) -> str:
    return "no such tensor" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"


def _shape(setup: PolicySetup) -> tuple[object, ...]:
    return setup.real_model, setup.loss.critic is None, setup.loss.kl_coefficient == 0.0


def _read_version(path: Path) -> int:
    position = read_json(path)
    if position.get("format") != FORMAT:
        raise CheckpointMismatch(path, "format", str(FORMAT), str(position.get("format")))
    version = position.get("version")
    if type(version) is not int or version < 0:
        raise CheckpointMismatch(path, "version", "a count", repr(version))
    return version

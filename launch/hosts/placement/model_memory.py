"""The shapes of models, from the headers of files on this host, or from their configs. Nothing is downloaded."""

import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from huggingface_hub import try_to_load_from_cache
from safetensors import SafetensorError, safe_open

from ....actors.messages import ModelConfig
from ....actors.model_shape import ModelShape, shape_of
from ....actors.names import PolicyName
from ....core.base.texts import text_of
from ...config.run_config import RunConfig

_ERROR_COLUMNS: Final = 240

ITEM_BYTES: Final = {"float32": 4, "bfloat16": 2}


def known_shapes(config: RunConfig, *, all_models: bool = False) -> dict[PolicyName, ModelShape]:
    """The shape of each policy's model; without those that are not known here.

    ``all_models``: also of models on a CPU without files here, which takes an import of torch: a small part of a run
    with GPUs, but a large one of the start of a tiny run.
    """
    # Policies often have the same model, and its outline takes seconds.
    of_models: dict[str, ModelShape | None] = {}
    shapes: dict[PolicyName, ModelShape] = {}
    for name, policy in config.policies.items():
        model = policy.used_model
        if model is not None:
            key = model.model_dump_json()
            if key not in of_models:
                of_models[key] = shape_of_model(model, may_import=all_models or model.device != "cpu")
            shape = of_models[key]
            shapes |= {} if shape is None else {name: shape}
    return shapes


def unknown_shape(config: RunConfig, name: PolicyName) -> str:
    """The reason why ``known_shapes`` does not have a policy, and what to do."""
    model = config.policies[name].real_model
    source = model.path
    key = f"policies.{name}.model.config" if source is None else f"policies.{name}.model.path={source!r}"
    if (
        source is None
        or Path(source).is_dir()
        or isinstance(try_to_load_from_cache(source, "config.json"), str)
    ):
        return f"{key}: the memory that it takes is unknown, as the model can't be built: {_obstacle(model)}"
    return (
        f"{key}: the memory that it takes is unknown: there is no such folder, and its config is not in the hub's "
        "cache here: "
        f"`hf download {source} config.json` puts it there, or write it by hand as model.config"
    )


def shape_of_model(model: ModelConfig, *, may_import: bool = True) -> ModelShape | None:
    """None if it is not known: a name on the hub whose config is not in the cache, or files that can't be read."""
    tensors = _headers(model)
    if not tensors and not may_import:
        return None
    from ....actors.model_sources import architecture_of  # imported here: with torch it takes five seconds

    try:
        architecture = architecture_of(model, local_files_only=True)
        if not tensors:
            from ....actors.pretrained import outline_of
            from ....transport.state_dict import without_ties

            outline = outline_of(model, local_files_only=True)
            weights = without_ties(outline.state_dict(keep_vars=True))
            tensors = {name: tuple(tensor.shape) for name, tensor in weights.items()}
        return shape_of(tensors, architecture)
    except Exception:  # noqa: BLE001  # a library's, of any type; ``_obstacle`` says why
        return None


def _obstacle(model: ModelConfig) -> str:
    """The first sentence of the error with which the model's outline can't be made."""
    from ....actors.model_sources import architecture_of
    from ....actors.pretrained import outline_of

    try:
        outline = outline_of(model, local_files_only=True)
        shape_of(
            {name: tuple(tensor.shape) for name, tensor in outline.named_parameters()},
            architecture_of(model, local_files_only=True),
        )
    except Exception as error:  # noqa: BLE001  # as above
        return textwrap.shorten(text_of(error).partition(". ")[0], _ERROR_COLUMNS, placeholder=" ...")
    return "its files can't be read"


def _headers(model: ModelConfig) -> Mapping[str, tuple[int, ...]]:
    """The shapes of the tensors in the model's files; empty without files here, or with damaged ones: they are refused
    when they are loaded."""
    if model.path is None:
        return {}
    folder = Path(model.path)
    if not folder.is_dir():
        cached = try_to_load_from_cache(model.path, "config.json")
        if not isinstance(cached, str):
            return {}
        folder = Path(cached).parent
    tensors: dict[str, tuple[int, ...]] = {}
    try:
        for file in sorted(folder.glob("*.safetensors")):
            with safe_open(file, framework="np") as opened:
                tensors |= {
                    name: tuple(opened.get_slice(name).get_shape())
                    for name in opened.keys()  # noqa: SIM118
                }
    except (OSError, SafetensorError):
        return {}
    return tensors

"""Measured times of engines: the tables of ``aiconfigurator-core`` (NVIDIA, Apache-2.0), the extra ``plan``.

The package has times of products, attention and sums over devices, measured with vLLM on named devices, and makes the
time of a step of a model's layers (AIConfigurator, arXiv 2601.06288). Here they become tables of an engine
(``actors/inference/measured_times.py``): of decode steps by sequences and context, and of prompts by their tokens. A
step's time beside the device is that of the device's description, as in a roofline.
"""

import json
import logging
import math
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, Protocol

from ...actors.errors import ConfigError
from ...actors.inference.measured_times import MeasuredTimes
from ...actors.messages import ModelConfig
from ...actors.model_shape import ModelShape
from .cluster_config import ClusterConfig
from .devices import PRESETS
from .roofline import EngineLoad

_BACKEND: Final = "vllm"
_BATCHES: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
_CONTEXTS: Final = (128, 512, 2048, 8192, 32768, 131072)
_PROMPTS: Final = (128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
_SHORT: Final = 128
"""Tokens of a short prompt, whose attention is a small part of its time."""


class StepEstimator(Protocol):
    """The part of the package's ``EngineHandle`` that is used here. Times are milliseconds."""

    def predict_decode_latency(self, bs: int, isl: int, osl: int = 2) -> float: ...

    def predict_prefill_latency(self, bs: int, isl: int, prefix: int = 0) -> float: ...


def measured_engine_times(
    model: ModelConfig, shape: ModelShape, cluster: ClusterConfig, load: EngineLoad, max_batch: int
) -> MeasuredTimes:
    """The tables of an engine whose devices are in one host, up to ``max_batch`` sequences. Raises ConfigError for a
    device, a model or a number of devices that was not measured, and if the package is missing."""
    tables = cluster.device.tables
    if tables is None:
        named = ", ".join(f"{name} ({device.tables})" for name, device in PRESETS.items() if device.tables)
        raise ConfigError(
            f"cluster.engine_times=measured: the device has no measured tables; there are those of {named}: take one "
            "of these, set cluster.device.tables to a system of aiconfigurator-core, or write "
            "cluster.engine_times=roofline"
        )
    if load.item_bytes != 2:
        raise ConfigError(
            f"cluster.engine_times=measured: the tables are of bfloat16, 2 bytes, and the model has {load.item_bytes}"
        )
    limit = shape.context or _CONTEXTS[-1]
    estimator = _estimator(model.model_dump_json(), tables, load.devices)
    with _translate_errors(tables, load.devices):
        return tables_of(
            estimator,
            batches=_up_to(_BATCHES, max_batch),
            contexts=_up_to(_CONTEXTS, limit),
            prompts=_up_to(_PROMPTS, limit),
            step_s=cluster.device.step_s,
            kv_tokens=load.kv_bytes * load.devices // shape.key_value_bytes(load.item_bytes),
        )


def tables_of(
    estimator: StepEstimator,
    *,
    batches: Sequence[int],
    contexts: Sequence[int],
    prompts: Sequence[int],
    step_s: float,
    kv_tokens: int,
) -> MeasuredTimes:
    """The tables with these entries. Raises ValueError for a time that is not a positive number."""

    def prompt_s(count: int, tokens: int) -> float:
        return _seconds(
            estimator.predict_prefill_latency(count, tokens), f"{count} prompts of {tokens} tokens"
        )

    products = [prompt_s(tokens // _SHORT, _SHORT) for tokens in prompts]
    return MeasuredTimes(
        step_s=step_s,
        batches=tuple(batches),
        contexts=tuple(contexts),
        decode=tuple(
            tuple(
                _seconds(estimator.predict_decode_latency(batch, context), f"{batch} x {context} tokens")
                for context in contexts
            )
            for batch in batches
        ),
        prompt_tokens=tuple(prompts),
        products=tuple(products),
        attention=tuple(
            max(0.0, prompt_s(1, tokens) - short) for tokens, short in zip(prompts, products, strict=True)
        ),
        kv_tokens=kv_tokens,
    )


def _seconds(milliseconds: float, work: str) -> float:
    if not (math.isfinite(milliseconds) and milliseconds > 0):
        raise ValueError(f"the tables give {milliseconds!r} ms for {work}")
    return milliseconds / 1e3


def _up_to(steps: Sequence[int], most: int) -> list[int]:
    """The entries of a table that is used up to ``most``: one beyond it, and two at least."""
    below = [step for step in steps if step < most]
    return [*steps[: max(2, len(below) + 1)]]


@lru_cache(maxsize=64)  # policies often share a model, and a device's tables take seconds to read
def _estimator(model_json: str, tables: str, devices: int) -> StepEstimator:
    """Raises ConfigError."""
    try:
        from aiconfigurator_core.sdk import EngineHandle
    except ImportError as error:
        raise ConfigError(
            f"cluster.engine_times=measured needs the extra: pip install 'flexmarl[plan]' ({error})"
        ) from error
    with tempfile.TemporaryDirectory() as folder, _translate_errors(tables, devices):
        config = json.dumps(_published_config(ModelConfig.model_validate_json(model_json)))
        (Path(folder) / "config.json").write_text(config)
        handle: StepEstimator = EngineHandle.compile(folder, tables, _BACKEND, tp_size=devices)
    return handle


def _published_config(model: ModelConfig) -> dict[str, Any]:
    """The model's config as a hub has it, with the name of its class."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    from ...actors.model_sources import architecture_of

    architecture = architecture_of(model)
    config: dict[str, Any] = architecture.to_dict()
    named = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(architecture.model_type, "")
    return {**config, "architectures": config.get("architectures") or [named]}


@contextmanager
def _translate_errors(tables: str, devices: int) -> Iterator[None]:
    """Errors of the package, which raises many kinds, become ConfigError. Its notes about tables of other kinds of
    models are left out."""
    logger = logging.getLogger("aiconfigurator_core")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    except Exception as error:
        raise ConfigError(
            f"cluster.engine_times=measured: no times of this model on {devices} devices of {tables}: "
            f"{type(error).__name__}: {error}"
        ) from error
    finally:
        logger.setLevel(level)

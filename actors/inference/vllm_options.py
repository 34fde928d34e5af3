"""vLLM's options by name (``engine.options``): those that pass through, and those that flexmarl sets itself.

vLLM is not imported: that takes seconds.
"""

import ast
import difflib
import functools
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

_INSTANCES: Final = (
    "an instance is one copy of the model on engine.tensor_parallel devices; set `instances` for more"
)
_WEIGHTS: Final = "weights come from the trainer, or from model.path"
_TOKENS: Final = "prompts and answers are tokens, with the log-probabilities that training needs"

RESERVED: Final[Mapping[str, str]] = {
    "model": "set model.path or model.config",
    "dtype": "set model.dtype",
    "max_model_len": "set engine.max_context",
    "max_num_seqs": "set engine.max_batch",
    "kv_cache_memory_bytes": "set engine.kv_cache_bytes",
    "gpu_memory_utilization": "set engine.kv_cache_bytes, the memory for keys and values in bytes",
    "num_gpu_blocks_override": "set engine.kv_cache_bytes",
    "enable_prefix_caching": "set engine.prefix_reuse",
    "enforce_eager": "set engine.enforce_eager",
    "async_scheduling": "set engine.async_scheduling",
    "tensor_parallel_size": "set engine.tensor_parallel",
    "pipeline_parallel_size": _INSTANCES,
    "prefill_context_parallel_size": _INSTANCES,
    "device_ids": _INSTANCES,
    "distributed_executor_backend": _INSTANCES,
    "nnodes": _INSTANCES,
    "node_rank": _INSTANCES,
    "master_addr": _INSTANCES,
    "master_port": _INSTANCES,
    "enable_lora": "set `lora` of the policy",
    "max_loras": "set `lora` of the policies",
    "max_cpu_loras": "set `lora` of the policies",
    "max_lora_rank": "set lora.rank of the policies",
    "load_format": _WEIGHTS,
    "model_weights": _WEIGHTS,
    "weight_transfer_config": _WEIGHTS,
    "enable_sleep_mode": _WEIGHTS,
    "worker_extension_cls": "flexmarl adds methods of its own to vLLM's workers",
    "worker_cls": "flexmarl adds methods of its own to vLLM's workers",
    "skip_tokenizer_init": _TOKENS,
    "tokenizer": _TOKENS,
    "tokenizer_mode": _TOKENS,
    "structured_outputs_config": "xgrammar holds answers to a schema: it refuses what it can't",
    "logprobs_mode": _TOKENS,
    "generation_config": "sampling is that of the agent",
    "override_generation_config": "sampling is that of the agent",
    "enable_chunked_prefill": "the device decides it: on GPUs prompts are cut into parts, on CPUs not",
    "disable_log_stats": "figures of the engine are those of the run",
    "enable_return_routed_experts": "set model.router_replay",
    "aux_output_config": "set model.router_replay",
    "runner": "an engine generates",
    "convert": "an engine generates",
}
"""The options that flexmarl sets itself, or that can't differ here, and the reason or the setting to use instead."""

_DATA_PARALLEL: Final = "data_parallel_"


def reserved_problem(options: Iterable[str]) -> str | None:
    """The reason for which ``options`` can't be given: the first of them that flexmarl sets itself."""
    for name in options:
        reason = _INSTANCES if name.startswith(_DATA_PARALLEL) else RESERVED.get(name)
        if reason is not None:
            return f"{name} can't be given here: {reason}"
    return None


def unknown_problem(options: Iterable[str], fields: Iterable[str]) -> str | None:
    """The reason for which ``options`` can't be given to a vLLM that has the options ``fields``."""
    names = sorted(fields)
    for name in options:
        if name not in names:
            similar = difflib.get_close_matches(name, names, n=1)
            hint = f"; did you mean {similar[0]}?" if similar else ": see `vllm serve --help=all`"
            return f"engine.options.{name}: this vLLM has no such option{hint}"
    return None


def installed_problem(options: Mapping[str, Any]) -> str | None:
    """As ``unknown_problem``, for the vLLM that is installed; None without one."""
    if not options:
        return None
    fields = _installed_names()
    return None if fields is None else unknown_problem(options, fields)


@functools.cache
def _installed_names() -> frozenset[str] | None:
    """The fields of vLLM's ``EngineArgs``, read from its source; None if there is no vLLM, or none of that form."""
    # Of a package at the top level this imports nothing.
    package = find_spec("vllm")
    if package is None or package.origin is None:
        return None
    try:
        source = (Path(package.origin).parent / "engine" / "arg_utils.py").read_text(encoding="utf-8")
    except OSError:
        return None
    return field_names(source, "EngineArgs")


def field_names(source: str, class_name: str) -> frozenset[str] | None:
    """The annotated names of a class in a module's source; None if it has no such class."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef) and node.name == class_name:
            targets = [line.target for line in node.body if isinstance(line, ast.AnnAssign)]
            return frozenset(target.id for target in targets if isinstance(target, ast.Name))
    return None

"""The process of the checks: ``python -P -m flexmarl.launch.run.preflight.process``.

Standard input holds the resolved config as JSON, standard output gets the findings as a line of JSON. While they take
long, it also gets lines with the place of the recipe's code: {"at": "workflow.py:3, in <module>: ..."}. The output of
the recipe goes to standard error.
"""

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any, Final, TextIO

from ....core.base.collector import importing

with importing():
    from ....actors.recipe.recipe_lines import lines_of_threads
    from ...config.run_config import RunConfig
    from .adapter_checks import missing_library, target_problems


_REPORT_S: Final = 10.0


def main() -> None:
    """Checks the config of standard input and ends the process, also if threads of the recipe still run. Raises
    pydantic's ValidationError if that has invalid values."""
    # The recipe may print, and a library in C writes to the descriptor itself: it is replaced, not only sys.stdout.
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    config = RunConfig.model_validate_json(sys.stdin.read())
    lock = threading.Lock()
    reporter = threading.Thread(target=_report_places, args=(Path(config.recipe).resolve(), output, lock))
    reporter.daemon = True
    reporter.start()
    findings = _findings(config)
    with lock:  # held to the end: the findings are the last line
        json.dump(findings, output)
        output.write("\n")
        # Threads that a recipe's modules have started don't keep the process.
        sys.stderr.flush()
        output.close()
        os._exit(0)


def _report_places(folder: Path, findings: TextIO, lock: threading.Lock) -> None:
    """Writes the line of the recipe that runs, every few seconds. Runs in a thread of its own. Ends the process once
    its reports have no reader: the program that asked has been killed, and the recipe may compute for ever."""
    while True:
        time.sleep(_REPORT_S)
        places = lines_of_threads(folder)
        with lock:
            try:
                json.dump({"at": "; ".join(places)}, findings)
                findings.write("\n")
                findings.flush()
            except BrokenPipeError:
                os._exit(1)


def _findings(config: RunConfig) -> dict[str, Any]:
    from .recipe_checks import function_problems, recipe_problems

    problems = recipe_problems(config) + list(function_problems(config))
    if config.simulated:
        return {"recipe": problems, "models": [], "cached": False, "warnings": []}
    adapters = list(missing_library(config))
    with_adapters = not adapters and any(policy.lora is not None for policy in config.policies.values())
    devices = _device_problems(config)
    if with_adapters:
        import torch  # noqa: F401  # the layers that they are for are found in models
    elif "torch" not in sys.modules:
        # Configs and tokenizers need no torch, and transformers imports it only if it is there: this saves 2 s.
        sys.modules["torch"] = None  # type: ignore[assignment]  # Python's sign for a module that can't be imported
    with importing():
        from .model_checks import model_findings
    of_models = model_findings(config)
    models = [vars(problem) for problem in (*devices, *of_models.problems)]
    if with_adapters and not models:
        adapters += target_problems(config, local_files_only=of_models.cached)
    return {
        "recipe": problems + adapters,
        "models": models,
        "cached": of_models.cached,
        "warnings": of_models.warnings,
    }


def _device_problems(config: RunConfig) -> list[Any]:
    models = [policy.used_model for policy in config.policies.values()]
    if all(model is None or model.device == "cpu" for model in models):
        return []
    from .model_checks import device_problems

    return list(device_problems(config))


if __name__ == "__main__":
    main()

"""The process of the checks: ``python -P -m flexmarl.launch.run.preflight.process DIRECTORY``.

Standard input holds the resolved config as JSON, standard output gets the findings as a line of JSON, and those of the
trial as another, if the first one says ``"trial": true``. ``DIRECTORY``: a private one, for the trial. While they take
long, there are also lines with the place of the recipe's code: {"at": "workflow.py:3, in <module>: ..."}. The output of
the recipe goes to standard error.
"""

import json
import os
import re
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final, TextIO

from ....core.base.collector import importing

with importing():
    from ....actors.recipe.recipe_lines import lines_of_threads
    from ...config.run_config import RunConfig
    from .adapter_checks import missing_library, target_problems
    from .recipe_checks import (
        RecipeFindings,
        filter_problems,
        function_problems,
        loss_problems_of,
        mentions,
        recipe_findings,
    )


_REPORT_S: Final = 10.0
_TORCH: Final = re.compile(r"\b(torch|transformers|peft|sentence_transformers|vllm)\b")
"""A recipe with such a word may import torch, or transformers with it, while its workflow runs."""


def main() -> None:
    """Checks the config of standard input and ends the process, also if threads of the recipe still run. Raises
    pydantic's ValidationError if that has invalid values."""
    # The recipe may print, and a library in C writes to the descriptor itself: it is replaced, not only sys.stdout.
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    config = RunConfig.model_validate_json(sys.stdin.read())
    lock = threading.Lock()

    def report(interval_s: float) -> None:
        places = (Path(config.recipe).resolve(), output, lock, interval_s)
        threading.Thread(target=_report_places, args=places, daemon=True).start()

    report(_REPORT_S)
    of_recipe = recipe_findings(config)
    findings = _findings(config, of_recipe)
    with lock:
        _write(output, findings)
    if findings["trial"]:
        if (interval_s := config.checks.trajectory_timeout_s / 4) < _REPORT_S:
            report(interval_s)
        trial = _trial(config, of_recipe, findings["cached"], Path(sys.argv[1]))
        with lock:
            _write(output, trial)
    # Threads that a recipe's modules have started don't keep the process.
    lock.acquire()  # the findings are the last line
    sys.stderr.flush()
    output.close()
    os._exit(0)


def _write(output: TextIO, message: dict[str, Any]) -> None:
    json.dump(message, output)
    output.write("\n")
    output.flush()


def _report_places(
    folder: Path, findings: TextIO, lock: threading.Lock, interval_s: float = _REPORT_S
) -> None:
    """Writes the line of the recipe that runs, every few seconds. Runs in a thread of its own. Ends the process once
    its reports have no reader: the program that asked has been killed, and the recipe may compute for ever."""
    while True:
        time.sleep(interval_s)
        places = lines_of_threads(folder)
        with lock:
            try:
                _write(findings, {"at": "; ".join(places)})
            except BrokenPipeError:
                os._exit(1)


def _findings(config: RunConfig, of_recipe: RecipeFindings) -> dict[str, Any]:
    problems = of_recipe.problems + list(function_problems(config))
    if not of_recipe.problems:
        problems += [*filter_problems(config), *loss_problems_of(config)]
    findings = {"models": [], "cached": False, "warnings": [], "digests": of_recipe.digests}
    if config.simulated:
        return {**findings, "recipe": problems, "trial": config.checks.trajectory and not problems}
    adapters = list(missing_library(config))
    with_adapters = not adapters and any(policy.lora is not None for policy in config.policies.values())
    devices = _device_problems(config)
    replays_routes = any(policy.replays_routes for policy in config.policies.values())
    if with_adapters or replays_routes:
        import torch  # noqa: F401  # layers of adapters and routers are found in models
    elif "torch" not in sys.modules and not mentions(Path(config.recipe), _TORCH):
        # Configs and tokenizers need no torch, and transformers imports it only if it is there: this saves 2 s.
        sys.modules["torch"] = None  # type: ignore[assignment]  # Python's sign for a module that can't be imported
    with importing():
        from .model_checks import model_findings
    of_models = model_findings(config)
    models = [vars(problem) for problem in (*devices, *of_models.problems)]
    if not problems and not models:
        from .sft_checks import example_problems

        problems += example_problems(config, local_files_only=of_models.cached)
    if with_adapters and not models:
        adapters += target_problems(config, local_files_only=of_models.cached)
    return {
        **findings,
        "recipe": problems + adapters,
        "models": models,
        "cached": of_models.cached,
        "warnings": of_models.warnings,
        "trial": config.checks.trajectory and not (problems or adapters or models),
    }


def _trial(config: RunConfig, of_recipe: RecipeFindings, cached: bool, directory: Path) -> dict[str, Any]:
    """``cached``: the hub can't be reached, and is not asked again."""
    from .trial import play_trial

    if sys.modules.get("torch", sys) is None:
        del sys.modules["torch"]  # the workflow may import it
    if cached:
        from huggingface_hub import constants

        constants.HF_HUB_OFFLINE = True
    assert of_recipe.recipe is not None, "the recipe has no problem"
    training = [*of_recipe.training, *of_recipe.further]
    return asdict(play_trial(config, of_recipe.recipe, training, of_recipe.evaluation, directory))


def _device_problems(config: RunConfig) -> list[Any]:
    models = [policy.used_model for policy in config.policies.values()]
    if all(model is None or model.device == "cpu" for model in models):
        return []
    from .model_checks import device_problems

    return list(device_problems(config))


if __name__ == "__main__":
    main()

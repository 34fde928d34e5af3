"""Makes the first training queries in a process: ``python -P -m flexmarl.launch.run.preflight.data_process DIRECTORY``.

``config.json`` in ``DIRECTORY`` is the resolved config; ``digests.json`` there gets the digests of the queries as a
list. If the recipe fails, the process ends without: the process of the checks, which runs beside this one, says why.
Python orders sets and hashes texts differently in each process, so that data which depends on that shows here.
"""

import json
import os
import sys
from pathlib import Path

from ....actors.errors import RecipeError
from ....actors.recipe.recipe import Recipe
from ...config.run_config import RunConfig
from .recipe_checks import COMPARED, first_digests


def main() -> None:
    """Writes the digests, and ends the process, also if threads of the recipe still run."""
    directory = Path(sys.argv[1])
    config = RunConfig.model_validate_json((directory / "config.json").read_text())
    try:
        count = min(COMPARED, config.training.queries_per_step)
        digests = first_digests(Recipe(config.recipe_config()), count)
    except RecipeError:
        os._exit(1)
    (directory / "digests.json").write_text(json.dumps(digests))
    os._exit(0)


if __name__ == "__main__":
    main()

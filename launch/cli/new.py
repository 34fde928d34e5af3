"""The command ``flexmarl new``: a copy of a built-in recipe as the start of another one."""

import shutil
from pathlib import Path

import click

from ...actors.errors import ConfigError
from ..config.config_reading import RECIPES
from ..monitoring.console.echo import echo

_IGNORED = shutil.ignore_patterns("__pycache__")
_LIKE = "plan-path"


def recipe_names() -> list[str]:
    """The built-in recipes that can be copied: those whose folder has all of their files."""
    configs = sorted(RECIPES.glob("*/config.yaml"))
    return [config.parent.name.replace("_", "-") for config in configs if "../" not in config.read_text()]


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option(
    "--like", metavar="RECIPE", default=_LIKE, show_default=True, help="The built-in recipe that is copied."
)
def new(folder: Path, like: str) -> int:
    """Make FOLDER, a recipe of your own: a copy of a built-in one to change.

    \b
    Examples:
      flexmarl new my-recipe
      flexmarl new my-recipe --like tool-math
    """
    names = recipe_names()
    if like not in names:
        raise ConfigError(f"--like {like}: there is no such recipe to copy; there are: {', '.join(names)}")
    copy_recipe(like, folder)
    echo(
        f"{folder} is a copy of {like}. Next:\n"
        f"  edit {folder / 'workflow.py'}       the task, the prompts and the rewards\n"
        f"  edit {folder / 'config.yaml'}       agents, models and training\n"
        f"  flexmarl train {folder} --dry-run    check both\n"
        f"  flexmarl train {folder}              train"
    )
    return 0


def copy_recipe(name: str, folder: Path) -> None:
    """Copies a built-in recipe into ``folder``. Raises ConfigError unless that is new or an empty folder."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} is there already and not an empty folder: name another one")
    shutil.copytree(RECIPES / name.replace("-", "_"), folder, ignore=_IGNORED, dirs_exist_ok=True)

"""The command ``flexmarl new``: a skeleton, or a copy of a built-in recipe, as the start of another one."""

import re
import shlex
import shutil
from pathlib import Path

import click

from ...actors.errors import ConfigError
from ...core.base.texts import guess
from ..config.config_reading import RECIPES
from ..monitoring.console.echo import echo
from .options import FilePath

_IGNORED = shutil.ignore_patterns("__pycache__")
_SKELETONS = Path(__file__).parents[1] / "skeletons"
_LIKE = "minimal"
_BESIDE = re.compile(r"\.\./(\w+)/")


def skeleton_names() -> list[str]:
    """Recipes of a few lines, which exist to be changed."""
    return sorted(config.parent.name for config in _SKELETONS.glob("*/config.yaml"))


def recipe_names() -> list[str]:
    """The built-in recipes."""
    return sorted(config.parent.name.replace("_", "-") for config in RECIPES.glob("*/config.yaml"))


@click.command()
@click.argument("folder", type=FilePath())
@click.option(
    "--like",
    metavar="NAME",
    default=_LIKE,
    show_default=True,
    help=f"A skeleton ({', '.join(skeleton_names())}) or the built-in recipe that is copied.",
)
def new(folder: Path, like: str) -> int:
    """Make FOLDER, a recipe of your own: a skeleton, or a copy of a built-in recipe, to change.

    \b
    minimal   one agent that answers the questions of a file
    chat      two agents with messages, a tool and supervised examples

    \b
    Examples:
      flexmarl new my-recipe
      flexmarl new my-recipe --like chat
      flexmarl new my-recipe --like tool-math
    """
    copy_recipe(like, folder)
    words = shlex.quote(str(folder))
    echo(
        f"{folder} is a copy of {like}. Next:\n"
        f"  edit {folder / 'workflow.py'}       the task, the prompts and the rewards\n"
        f"  edit {folder / 'config.yaml'}       agents, models and training\n"
        f"  flexmarl train {words} --dry-run    check both\n"
        f"  flexmarl train {words}              train"
    )
    return 0


def copy_recipe(name: str, folder: Path) -> None:
    """Copies a skeleton or a built-in recipe into ``folder``. Raises ConfigError for an unknown name, and unless the
    folder is new or empty."""
    names = [*skeleton_names(), *recipe_names()]
    if name not in names:
        raise ConfigError(
            f"--like {name}: there is no such recipe to copy; there are: {', '.join(names)}{guess(name, names)}"
        )
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} is there already and not an empty folder: name another one")
    source = _SKELETONS / name if name in skeleton_names() else RECIPES / name.replace("-", "_")
    config = (source / "config.yaml").read_text()
    beside = _BESIDE.search(config)
    if beside is None:
        shutil.copytree(source, folder, ignore=_IGNORED, dirs_exist_ok=True)
        return
    # It has the task and the files of another recipe: the copy has them too, and its own settings.
    shutil.copytree(RECIPES / beside[1], folder, ignore=_IGNORED, dirs_exist_ok=True)
    (folder / "config.yaml").write_text(_BESIDE.sub("", config))

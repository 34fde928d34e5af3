"""The loading of a recipe's code.

A recipe is a folder with a ``workflow.py`` and a ``config.yaml``. ``workflow.py`` defines

    async def workflow(query: Query, agents: Agents) -> Rewards      (or workflow = a class derived from Environment)
    def train_query(position: int, seed: int, **data) -> Query       (optional, if query_source does not draw from it)
    def query_source(positions: QuerySource, seed: int, **data) -> QuerySource      (optional)
    def eval_queries(seed: int, **data) -> Sequence[Query]           (both may be files instead: ``data_files.py``)
    def sft(agent: str, batch: int, size: int, seed: int, **data) -> Sequence[tuple[str, str] | messages]  (optional)
    async def setup(**data), async def teardown()    (optional; once in each rollout worker)

``data`` is the config's section of that name.
"""

import asyncio
import importlib.util
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, Final, cast

from ...core.base.texts import half_problem, text_of
from ..chat.conversation import Conversation, conversation_of
from ..config_base import Config
from ..environments.environment import Environment, Environments
from ..errors import RecipeError
from ..messages import Query
from ..workflow import Workflow
from .data_files import DataFiles
from .query_problem import query_problem
from .query_source import QuerySource
from .sources.plain_source import PlainSourceConfig
from .sources.source_config import SourceConfig
from .user_traceback import user_line, user_traceback

__all__ = ["MODULE_PREFIX", "Recipe", "RecipeConfig", "module_of"]

MODULE_PREFIX: Final = "flexmarl_recipe_"
"""The begin of the name of the module that ``workflow.py`` becomes; the name of its folder follows."""


def module_of(file: Path, name: str) -> ModuleType:
    """Runs a file of a recipe as the module ``name``. Raises what the file raises."""
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses in a recipe look their module up
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))  # it may import modules that lie beside it
    spec.loader.exec_module(module)
    return module


class RecipeConfig(Config):
    """The folder of a recipe's code, and the ``data`` section that its functions get."""

    folder: str
    data: dict[str, Any]
    seed: int
    query_source: SourceConfig = PlainSourceConfig()
    whole_tracebacks: bool = False
    """Show flexmarl's frames too in the tracebacks of its functions."""


class Recipe:
    """A recipe's functions, loaded from its folder and bound to its data."""

    def __init__(self, config: RecipeConfig) -> None:
        """Runs ``workflow.py``: ``file`` in ``folder``. Raises RecipeError if it is missing or lacks a function."""
        self._config = config
        self.folder = Path(config.folder).resolve()
        self.file = self.folder / "workflow.py"
        self._module = self._load()
        self._files = self._data_files()
        self.workflow, self.environments = self._workflow()
        if not self.defines("query_source") and not self.defines("train_query"):
            raise RecipeError(
                f"{self.file} defines no function 'train_query': write it, or name a file of queries by data.train"
            )
        if self.defines("query_source") and self._names_source:
            raise RecipeError(
                f"{self.file} defines query_source, and the config names another source, query_source.name="
                f"{self._config.query_source.name}: leave one of them out"
            )
        self._eval_queries = self.function("eval_queries")

    @property
    def has_source(self) -> bool:
        """True if a query source stands between ``train_query`` and the run: the recipe's own, or the config's."""
        return self.defines("query_source") or self._names_source

    @property
    def environment_class(self) -> type[Environment] | None:
        """The class that the workflow is; None if it is a function."""
        workflow = self.function("workflow")
        return workflow if isinstance(workflow, type) and issubclass(workflow, Environment) else None

    @property
    def _names_source(self) -> bool:
        return not isinstance(self._config.query_source, PlainSourceConfig)

    def defines(self, name: str) -> bool:
        """True if ``workflow.py`` has the name: some functions are optional. Files of ``data`` are functions too."""
        return hasattr(self._module, name) or hasattr(self._files, name)

    async def setup(self, timeout_s: float) -> None:
        """Calls the recipe's ``setup``, then its environment's: once in each rollout worker, before all workflows.

        Raises RecipeError for their errors, and after ``timeout_s``.
        """
        with self.users_code("setup"):
            async with _within(timeout_s):
                if self.defines("setup"):
                    await self.function("setup")(**self._config.data)
                if self.environments is not None:
                    await self.environments.setup(self._config.data)

    async def teardown(self, timeout_s: float) -> None:
        """Closes the environment, then calls the recipe's ``teardown``: once in each worker, after all workflows.

        Raises RecipeError for their errors, and after ``timeout_s``.
        """
        with self.users_code("teardown"):
            async with _within(timeout_s):
                try:
                    if self.environments is not None:
                        await self.environments.close()
                finally:
                    if self.defines("teardown"):
                        await self.function("teardown")()

    def train_query(self, position: int) -> Query:
        """The query at ``position`` (0, 1, ...) of the training data: a function of position and seed alone.

        Raises RecipeError if it is missing or fails, or gives no query that can be sent to the rollout workers.
        """
        train_query = self.function("train_query")
        with self.users_code("train_query"):
            query: object = train_query(position, self._config.seed, **self._config.data)
        return self.check_query(query, f"train_query({position}, seed)")

    def query_source(self, positions: QuerySource) -> QuerySource:
        """The recipe's own query source, or the config's. ``positions``: the source of its ``train_query``.

        Raises RecipeError if ``query_source`` fails, or returns something else.
        """
        if not self.defines("query_source"):
            return self._config.query_source.source(positions, self._config.seed)
        function = self.function("query_source")
        with self.users_code("query_source"):
            source: object = function(positions, self._config.seed, **self._config.data)
        if not isinstance(source, QuerySource):
            raise RecipeError(
                f"{self.file}: query_source returns {type(source).__name__}, not a flexmarl.QuerySource"
            )
        return source

    def eval_queries(self) -> list[Query]:
        """Raises RecipeError as ``train_query``."""
        with self.users_code("eval_queries"):
            queries: list[object] = list(self._eval_queries(self._config.seed, **self._config.data))
        return [
            self.check_query(query, f"query {number} of eval_queries") for number, query in enumerate(queries)
        ]

    def sft(self, agent: str, batch: int, size: int) -> list[tuple[str, str] | Conversation]:
        """The examples of one supervised batch: prompt and completion, or messages. Raises RecipeError if it fails, or
        gives others."""
        with self.users_code("sft"):
            examples = list(self.function("sft")(agent, batch, size, self._config.seed, **self._config.data))
        return [
            self._example(example, f"example {number} of batch {batch} for agent {agent}")
            for number, example in enumerate(examples)
        ]

    def _example(self, example: Any, which: str) -> tuple[str, str] | Conversation:
        if _is_pair(example):
            prompt, completion = example
            if problem := half_problem({"prompt": prompt, "completion": completion}):
                raise RecipeError(f"{self.file.name}: sft gives {which} whose {problem}")
            return prompt, completion
        if not isinstance(example, Mapping | list | tuple) or not all(map(_is_part, example)):
            expected = "a pair of strings (prompt, completion), or messages"
            raise RecipeError(f"{self.file.name}: sft gives {example!r} as {which}, not {expected}")
        try:
            return conversation_of(example)
        except ValueError as error:
            raise RecipeError(f"{self.file.name}: sft gives {which} with {error}") from error

    def check_query(self, query: object, which: str) -> Query:
        """Returns ``query``, if it is a query that can be sent to the rollout workers. Raises RecipeError otherwise.

        ``which``: what has given it.
        """
        if (problem := query_problem(query)) is not None:
            raise RecipeError(f"{self.file.name}: {which} gives {problem}")
        return cast(Query, query)

    def frames(self, error: BaseException) -> str:
        """The error with the frames that help the recipe's author: see ``user_traceback``."""
        return user_traceback(error, self.folder, whole=self._config.whole_tracebacks)

    def line(self, error: BaseException) -> str:
        """The recipe's innermost line in the error; empty without one."""
        return user_line(error, self.folder)

    def _workflow(self) -> tuple[Workflow, Environments | None]:
        """The workflow; an environment's class is made one here. Raises RecipeError for another class."""
        workflow = self.function("workflow")
        if not isinstance(workflow, type):
            return cast(Workflow, workflow), None
        if not issubclass(workflow, Environment):
            raise RecipeError(
                f"{self.file}: workflow is the class {workflow.__name__}, which is not derived from "
                "flexmarl.actors.Environment"
            )
        environments = Environments(workflow)
        return environments, environments

    def _data_files(self) -> DataFiles | None:
        """The functions of the data section's files, if ``workflow.py`` has no data of its own."""
        if hasattr(self._module, "train_query") or not isinstance(self._config.data.get("train"), str):
            return None
        return DataFiles(self.folder, self._config.data)

    def _load(self) -> ModuleType:
        if not self.file.is_file():
            raise RecipeError(
                f"{self.file} does not exist: a recipe is a folder with workflow.py and config.yaml"
            )
        with self.users_code("loading"):
            return module_of(self.file, f"{MODULE_PREFIX}{Path(self._config.folder).name}")

    @contextmanager
    def users_code(self, what: str) -> Iterator[None]:
        """Turns errors of the recipe's own functions into RecipeErrors that show their frames."""
        try:
            yield
        except RecipeError:
            raise
        except Exception as error:  # any error is the recipe's: none of its functions may fail
            text = f"{type(error).__name__}: {text_of(error)}"
            raise RecipeError(f"{self.file}: {what} failed: {text}\n{self.frames(error)}") from error

    def function(self, name: str) -> Callable[..., Any]:
        """A function of ``workflow.py``, or of the files of ``data``. Raises RecipeError if it is missing."""
        function = getattr(self._module, name, None) or getattr(self._files, name, None)
        if not callable(function):
            raise RecipeError(f"{self.file} defines no function {name!r}")
        return cast(Callable[..., Any], function)


def _is_part(part: object) -> bool:
    """True for a message, and for a key of an example that has some."""
    return isinstance(part, Mapping) or part in ("messages", "tools")


def _is_pair(example: object) -> bool:
    return (
        isinstance(example, tuple | list)
        and len(example) == 2
        and all(isinstance(part, str) for part in example)
    )


@asynccontextmanager
async def _within(timeout_s: float) -> AsyncIterator[None]:
    """Raises TimeoutError, which says so, after ``timeout_s``."""
    try:
        async with asyncio.timeout(timeout_s) as deadline:
            yield
    except TimeoutError:
        if not deadline.expired():
            raise
        raise TimeoutError(f"not done within {timeout_s:g} s") from None

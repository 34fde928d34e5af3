"""Filter that is a function of the user's."""

import inspect
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from ...core.base.texts import text_of
from ..errors import ConfigError, RecipeError
from ..recipe.named_function import named_function
from .group_filter import Exclusion, FilterOptions, FinishedGroup, Judge

if TYPE_CHECKING:
    from ..recipe.recipe import Recipe


class UsersFilter(FilterOptions):
    """A function of the recipe that gets a ``FinishedGroup``, and returns the reason for which the group is dropped, an
    ``Exclusion``, or None."""

    name: Literal["function"] = "function"
    """Filter of a group's samples."""
    function: Annotated[str, Field(pattern=r"^[\w./-]+:\w+$")]
    """`file.py:function` of the recipe's folder, or `module:function`."""

    @property
    def label(self) -> str:
        return self.function.partition(":")[2]

    def load(self, recipe: "Recipe") -> Judge:
        subject = f"filter {self.function}"
        try:
            function = named_function(recipe.folder, self.function)
        except ConfigError as error:
            raise RecipeError(f"{subject}: {error}") from None
        except Exception as error:  # any error of the module is the user's
            raise RecipeError(f"{subject}: {type(error).__name__}: {text_of(error)}") from error
        if inspect.iscoroutinefunction(inspect.unwrap(function)):
            raise RecipeError(f"{subject} is async: write def")

        def judge(group: FinishedGroup) -> Exclusion | None:
            try:
                result: Any = function(group)
            except Exception as error:  # any error is the user's: the function may not fail
                text = f"{type(error).__name__}: {text_of(error)}"
                raise RecipeError(f"{subject} failed: {text}\n{recipe.frames(error)}") from error
            if result is None or isinstance(result, Exclusion):
                return result
            if isinstance(result, str):
                return Exclusion(result) if result else None
            raise RecipeError(
                f"{subject} returns {type(result).__name__}: a text drops the group, None keeps it, and an Exclusion "
                "names the samples that are left out"
            )

        return judge

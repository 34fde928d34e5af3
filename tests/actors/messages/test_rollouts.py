"""Queries that trajectories are named after."""

import pytest

from flexmarl.actors.errors import RecipeError
from flexmarl.actors.messages import Query, refuse_equal_ids


def test_the_queries_of_an_evaluation_have_ids_of_their_own() -> None:
    refuse_equal_ids([Query("q7", "x"), Query("q8", "x")], "the evaluation")
    with pytest.raises(RecipeError, match="the evaluation has two queries with the id 'q7'"):
        refuse_equal_ids([Query("q7", "x"), Query("q8", "x"), Query("q7", "y")], "the evaluation")

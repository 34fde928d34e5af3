"""Errors of the roles: each can be declared by an endpoint, so that it keeps its class on the wire."""

import pytest

from flexmarl.actors import errors
from flexmarl.core.protocol.declared_errors import DeclaredErrors

ERRORS = [
    found
    for found in vars(errors).values()
    if isinstance(found, type) and found.__module__ == errors.__name__
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: error.__name__)
def test_an_endpoint_can_declare_it(error: type[Exception]) -> None:
    DeclaredErrors((error,))

"""Errors of Set and Get: each can be declared by an endpoint, so that it keeps its class on the wire."""

import pytest

from flexmarl.core.protocol.declared_errors import DeclaredErrors
from flexmarl.transport import errors

ERRORS = [
    found
    for found in vars(errors).values()
    if isinstance(found, type) and found.__module__ == errors.__name__
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: error.__name__)
def test_an_endpoint_can_declare_it(error: type[Exception]) -> None:
    DeclaredErrors((error,))

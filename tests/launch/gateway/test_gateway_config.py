"""The address of a run's gateway."""

import pytest
from pydantic import ValidationError

from flexmarl.launch.gateway.gateway_config import GatewayConfig, address_of


@pytest.mark.parametrize(
    ("listen", "address"),
    [
        ("8000", ("127.0.0.1", 8000)),
        (8000, ("127.0.0.1", 8000)),
        ("0.0.0.0:0", ("0.0.0.0", 0)),
        ("[::1]:80", ("::1", 80)),
        ("host:65535", ("host", 65535)),
    ],
)
def test_an_address_is_a_port_or_a_host_and_a_port(listen: str, address: tuple[str, int]) -> None:
    config = GatewayConfig.model_validate({"listen": listen})
    assert config.listen is not None and address_of(config.listen) == address


@pytest.mark.parametrize("listen", ["host", "host:", "host:65536", "host:-1", "", True, "host:8x"])
def test_anything_else_is_none(listen: object) -> None:
    with pytest.raises(ValidationError):
        GatewayConfig.model_validate({"listen": listen})

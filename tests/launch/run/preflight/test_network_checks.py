"""The address at which a run listens, tried before the start."""

import pytest

from flexmarl.launch.config.config_reading import resolve
from flexmarl.launch.run.preflight.network_checks import network_problems

from ...conftest import TINY


@pytest.mark.parametrize("listen", ["127.0.0.1", None])
def test_an_address_of_this_host_is_no_problem(listen: str | None) -> None:
    settings = [] if listen is None else [f"network.listen={listen}"]
    assert [*network_problems(resolve(str(TINY), settings))] == []


@pytest.mark.parametrize(
    ("listen", "problem"),
    [
        (
            "192.0.2.1",
            "network.listen=192.0.2.1: this host can't listen there (Cannot assign requested address)",
        ),
        ("no-such-host.invalid", "network.listen=no-such-host.invalid: this host does not know the name ("),
    ],
)
def test_another_address_is_named_with_its_key_and_the_remedy(listen: str, problem: str) -> None:
    (found,) = network_problems(resolve(str(TINY), [f"network.listen={listen}"]))
    assert found.startswith(problem)
    assert found.endswith("write network.listen=auto, or one of this host's addresses")

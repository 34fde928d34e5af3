"""``scripts/bench/run relays``: real processes, hosts of this machine with limited ports, and a small version."""

import shutil

import pytest

from flexmarl.launch.bench import namespaces
from scripts.bench.relays import measure

MISSING = namespaces.missing() or (None if shutil.which("tc") else "there is no program tc")


@pytest.mark.skipif(MISSING is not None, reason=f"hosts are network namespaces: {MISSING}")
def test_a_version_goes_from_host_to_host() -> None:
    result = measure(2, 64 << 20, 2000, 1, encrypted=False)
    # A busy machine may make the second host late, which reads the rest from the owner.
    assert 0 < result["relayed"] <= 0.5
    assert result["relayed"] == 0.5 or result["relays_left"]
    assert result["all_s"] > result["port_s"]
    assert not [name for name in namespaces._existing() if "host" in name]

"""The certificate of a run."""

import pytest
from cryptography import x509

from flexmarl.core import Keys
from flexmarl.core.errors import InvalidKeys
from flexmarl.transport.remote.bulk import secret_of
from flexmarl.transport.remote.certificate import certificate

# RFC 8032, section 7.1: secret key, public key
VECTORS = [
    (
        "9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60",
        "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a",
    ),
    (
        "4ccd089b28ff96da9db6c346ec114e0f5b8a319f35aba624da8cf6ed4fb8a6fb",
        "3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c",
    ),
]


@pytest.mark.parametrize(("seed", "public"), VECTORS)
def test_the_public_key_is_that_of_the_standard(seed: str, public: str) -> None:
    made = x509.load_der_x509_certificate(certificate(bytes.fromhex(seed)))
    assert made.public_key().public_bytes_raw().hex() == public  # type: ignore[union-attr]  # an Ed25519 key
    made.verify_directly_issued_by(made)  # raises InvalidSignature


def test_all_nodes_of_a_run_compute_the_same_one_and_others_another() -> None:
    keys = Keys.make()
    seed = secret_of(keys, "certificate")
    assert certificate(seed) == certificate(secret_of(keys, "certificate"))
    assert seed not in certificate(seed)
    others = {secret_of(keys, "plain"), secret_of(Keys.make(), "certificate"), seed}
    assert len(others) == 3


def test_a_client_from_outside_has_none() -> None:
    with pytest.raises(InvalidKeys, match="server_secret"):
        secret_of(Keys.for_client(Keys.make().server_public), "certificate")

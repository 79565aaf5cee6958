import os
import stat

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from libp2p.peer.id import ID

from swarmnode.errors import Refused, StateError, Unavailable
from swarmnode.p2p import identity


def test_new_identity_is_private_and_permanent(tmp_path):
    path = tmp_path / "data" / "identity.key"
    first = identity.load_or_create(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert identity.load_or_create(path).peer_id == first.peer_id
    assert os.listdir(path.parent) == ["identity.key"]  # no temporary file is left


def test_peer_id_matches_libp2p(tmp_path):
    mine = identity.load_or_create(tmp_path / "identity.key")
    raw = mine.private_key.public_key().public_bytes(
        serialization.Encoding.Raw, serialization.PublicFormat.Raw
    )
    assert raw == mine.key_pair.public_key.to_bytes()
    assert mine.peer_id.startswith("12D3Koo")
    assert ID.from_string(mine.peer_id) == ID.from_pubkey(mine.key_pair.public_key)
    assert mine.key_pair.public_key.verify(b"x", mine.private_key.sign(b"x"))


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644, 0o620])
def test_readable_key_is_refused_with_the_remedy(tmp_path, mode):
    path = tmp_path / "identity.key"
    identity.load_or_create(path)
    path.chmod(mode)
    with pytest.raises(Refused, match=f"chmod 600 {path}") as caught:
        identity.load_or_create(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"not a key",
        b"-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n",
        b"\xff" * 100_000,
        ec.generate_private_key(ec.SECP256R1()).private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        ),
    ],
    ids=["empty", "text", "PEM", "long", "another kind"],
)
def test_damaged_key_is_a_state_error(tmp_path, data):
    path = tmp_path / "identity.key"
    path.write_bytes(data)
    path.chmod(0o600)
    with pytest.raises(StateError):
        identity.load_or_create(path)
    assert path.read_bytes() == data


def test_unwritable_directory_is_unavailable(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(Unavailable):
        identity.load_or_create(tmp_path / "file" / "identity.key")


def test_repr_hides_the_key(tmp_path):
    mine = identity.load_or_create(tmp_path / "identity.key")
    seed = mine.private_key.private_bytes(
        serialization.Encoding.Raw, serialization.PrivateFormat.Raw, serialization.NoEncryption()
    )
    assert seed.hex() not in repr(mine)
    assert repr(seed) not in repr(mine)
    assert "private_key" not in repr(mine)


@pytest.mark.parametrize("left", ["peers.json", "trainer", None])
def test_lost_key_is_logged_once(tmp_path, left, caplog):
    """A lost key is logged with its remedy; a first start logs nothing."""
    if left == "trainer":
        (tmp_path / left).mkdir()
    elif left:
        (tmp_path / left).write_bytes(b"{}")
    made = identity.load_or_create(tmp_path / "identity.key")
    identity.load_or_create(tmp_path / "identity.key")
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == (left is not None)
    assert all(made.peer_id in line and "swarmnode key import" in line for line in messages)

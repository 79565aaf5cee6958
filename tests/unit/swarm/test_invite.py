"""Accepted invites and the errors for invalid ones."""

import pytest

from protocol.generate.frames import OTHER_PEER, PEER
from swarmnode.errors import ConfigError
from swarmnode.swarm import invite

SWARM = "ab" * 32
ONE = f"/ip4/192.0.2.7/tcp/9512/p2p/{PEER}"
TWO = f"/dns4/example.org/tcp/9512/p2p/{OTHER_PEER}"


@pytest.mark.parametrize("addresses", [[ONE], [ONE, TWO], [f"/ip6/2001:db8::7/tcp/1/p2p/{PEER}"]])
def test_written_invite_is_parsed(addresses):
    written = str(invite.Invite(tuple(addresses), bytes.fromhex(SWARM)))
    assert invite.parse(f"  {written}\n") == invite.Invite(tuple(addresses), bytes.fromhex(SWARM))


def test_an_address_twice_counts_once():
    assert invite.parse(f"{ONE},{ONE}/swarm/{SWARM}").addresses == (ONE,)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", "no /swarm/"),
        (f"/swarm/{SWARM}", "not of the form"),
        (f"/ip4/192.0.2.7/tcp/9512/swarm/{SWARM}", "does not end in /p2p/"),
        (f"/ip4/0.0.0.0/tcp/9512/p2p/{PEER}/swarm/{SWARM}", "cannot be dialled"),
        (f"/ip4/192.0.2.7/tcp/9512/p2p/{PEER[:-1]}/swarm/{SWARM}", "peer id"),
    ],
)
def test_invalid_invites_are_explained(text, error):
    with pytest.raises(ConfigError, match=r"^invite: ") as raised:
        invite.parse(text)
    assert error in str(raised.value)
    assert "\n" not in str(raised.value)


SECRET = "5e" * 32


def test_secret_is_split_from_an_invite():
    plain = invite.parse(f"{ONE}/swarm/{SWARM}")
    whole = invite.with_secret(plain, bytes.fromhex(SECRET))
    assert invite.split_secret(f" {whole}\n") == (str(plain), bytes.fromhex(SECRET))
    assert invite.split_secret(str(plain)) == (str(plain), None)
    with pytest.raises(ConfigError, match="cut off"):
        invite.split_secret(whole[:-1])


def test_invite_with_a_secret_is_refused_where_others_can_read_it():
    with pytest.raises(ConfigError, match="run `swarmnode join` without it and paste it") as error:
        invite.parse(f"{ONE}/swarm/{SWARM}/secret/{SECRET}")
    assert SECRET[:4] not in str(error.value)

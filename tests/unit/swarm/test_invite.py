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
        (ONE, "no /swarm/"),
        (f"{ONE}/swarm/{SWARM[:-1]}", "cut off"),
        (f"{ONE}/swarm/{SWARM.upper()}", "lower-case"),
        (f"{ONE}/swarm/{SWARM}/x", "64 lower-case"),
        (f"/swarm/{SWARM}", "not of the form"),
        (f"{ONE},/swarm/{SWARM}", "not of the form"),
        (f"/ip4/192.0.2.7/tcp/9512/swarm/{SWARM}", "does not end in /p2p/"),
        (f"/ip4/192.0.2.7/udp/9512/quic-v1/p2p/{PEER}/swarm/{SWARM}", "not of the form"),
        (f"/ip4/192.0.2.700/tcp/9512/p2p/{PEER}/swarm/{SWARM}", "192.0.2.700"),
        (f"/ip4/0.0.0.0/tcp/9512/p2p/{PEER}/swarm/{SWARM}", "cannot be dialled"),
        (f"/ip4/192.0.2.7/tcp/0/p2p/{PEER}/swarm/{SWARM}", "cannot be dialled"),
        (f"/ip4/192.0.2.7/tcp/9512/p2p/{PEER[:-1]}/swarm/{SWARM}", "peer id"),
        (",".join([ONE] * 17) + f"/swarm/{SWARM}", "at most 16"),
        ("x" * 10_000, "something else"),
    ],
)
def test_invalid_invites_are_explained(text, error):
    with pytest.raises(ConfigError, match=r"^invite: ") as raised:
        invite.parse(text)
    assert error in str(raised.value)
    assert "\n" not in str(raised.value)

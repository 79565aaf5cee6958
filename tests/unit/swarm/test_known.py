"""Known peers: named by the operator, on a signed list, or in a private swarm."""

import msgspec
import pytest

from swarmnode.swarm.known import known_peers
from tests.support.manifests import founded

PEER = "12D3KooWK99VoVxNE7XzyBwXEzW7xhK7Gpv85r9F3V3fyKSUKPH5"
OTHER = "12D3KooWJWoaqZhDaoEFshF7Rh1bpY9ohihFhzcW6d69Lr2NASuq"


def test_nobody_is_known_without_a_list_a_secret_or_a_name():
    for opened in (None, founded()):
        known = known_peers([], opened)
        assert not known
        assert PEER not in known


def test_named_peers_are_known_and_others_are_not():
    known = known_peers([PEER], founded())
    assert PEER in known
    assert OTHER not in known


def test_anyone_knows_every_peer():
    assert OTHER in known_peers(["anyone"], None)


@pytest.mark.parametrize("private", [False, True])
def test_members_of_a_list_and_of_a_private_swarm_are_known(private):
    opened = founded()
    access = msgspec.structs.replace(
        opened.manifest.access,
        members=[] if private else [PEER],
        secret=bytes(32) if private else b"",
    )
    manifest = msgspec.structs.replace(opened.manifest, access=access)
    known = known_peers([], msgspec.structs.replace(opened, manifest=manifest))
    assert PEER in known
    assert (OTHER in known) == private

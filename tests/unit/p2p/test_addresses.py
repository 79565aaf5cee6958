import base58
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.generate.frames import SMALL_ORDER_KEYS
from swarmnode.errors import BadMessage
from swarmnode.p2p import addresses
from swarmnode.p2p.addresses import LOOPBACK, PRIVATE, PUBLIC, Address, dialable, parse
from swarmnode.p2p.library.identifiers import peer_id_text
from swarmnode.p2p.listening import concrete_addresses
from swarmnode.wire.envelope import peer_id

PEER = peer_id(bytes(range(32)))


@pytest.mark.parametrize(
    "text",
    [
        "/ip4/127.0.0.1/tcp/4001",
        "/ip6/::1/tcp/0",
        "/dns4/node.example.org/tcp/65535",
        "/dns/localhost/tcp/1",
    ],
)
def test_address_round_trips(text):
    assert str(parse(text)[0]) == text
    address, peer = parse(f"{text}/p2p/{PEER}")
    assert (str(address), peer) == (text, PEER)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "/",
        "127.0.0.1:4001",
        "/ip4/127.0.0.1",
        "/ip4/127.0.0.1/udp/4001",
        "/ip4/256.0.0.1/tcp/1",
        "/ip4/127.0.0.1/tcp/65536",
        "/ip4/127.0.0.1/tcp/-1",
        "/ip4/127.0.0.1/tcp/٣",
        "/ip4/127.0.0.1/tcp/",
        "/ip4/127.0.0.1/tcp/1/ws",
        "/ip4/127.0.0.1/tcp/1/p2p/",
        "/dns4/-bad/tcp/1",
        "/dns4/a..b/tcp/1",
        "/dns4/" + "a" * 64 + "/tcp/1",
        "/unix/tmp/tcp/1",
        "/ip4/127.0.0.1/tcp/1/p2p/Qm" + "a" * 44,
        "/ip4/127.0.0.1/tcp/1/quic/" + PEER,
        "/ip4/1.2.3.4/tcp/1/p2p/" + PEER + "/p2p-circuit",
        "/dns4/" + "a." * 200 + "b/tcp/1",
    ],
)
def test_other_address_forms_are_refused(text):
    with pytest.raises(ValueError):
        parse(text)


@pytest.mark.parametrize("key", SMALL_ORDER_KEYS, ids=bytes.hex)
def test_small_order_peer_ids_are_refused(key):
    with pytest.raises(ValueError):
        parse(f"/ip4/127.0.0.1/tcp/1/p2p/{peer_id(key)}")
    with pytest.raises(BadMessage):
        peer_id_text(base58.b58decode(peer_id(key)))


@given(st.text(alphabet="/ipdns46tcp0127.:%\x00é", max_size=80) | st.text(max_size=300))
def test_parser_raises_only_value_error(text):
    try:
        address, _ = parse(text)
    except ValueError:
        return
    assert parse(str(address))[0] == address


@pytest.mark.parametrize(
    ("host", "scope", "prefix"),
    [
        ("127.0.0.1", LOOPBACK, None),
        ("::1", LOOPBACK, None),
        ("192.168.7.9", PRIVATE, "192.168.7.0/24"),
        ("8.8.4.4", PUBLIC, "8.8.4.0/24"),
        ("2606:4700:1:2::1", PUBLIC, "2606:4700:1::/48"),
        ("fd00::1", PRIVATE, "fd00::/48"),
    ],
)
def test_scope_and_prefix(host, scope, prefix):
    address = addresses.from_socket(host, 1)
    assert (address.scope, address.prefix) == (scope, prefix)


@pytest.mark.parametrize(
    ("host", "reporter", "allowed"),
    [
        ("8.8.8.8", "9.9.9.9", True),
        ("127.0.0.1", "9.9.9.9", False),
        ("192.168.0.1", "9.9.9.9", False),
        ("192.168.0.1", "10.0.0.1", True),
        ("127.0.0.1", "192.168.0.1", False),
        ("127.0.0.1", "127.0.0.1", True),
        ("0.0.0.0", "127.0.0.1", False),
        ("224.0.0.1", "127.0.0.1", False),
        ("169.254.169.254", "10.0.0.1", False),
    ],
)
def test_reported_addresses_need_the_scope_of_their_reporter(host, reporter, allowed):
    assert dialable(Address("ip4", host, 1), Address("ip4", reporter, 2)) is allowed


def test_peer_id_must_be_canonical_ed25519():
    assert addresses.check_peer_id(PEER) == PEER
    for wrong in (
        "1" + PEER,
        PEER[:-1],
        PEER + "1",
        "",
        "0" * 52,
        base58.b58encode(b"\x12\x20" + bytes(32)).decode(),
    ):
        with pytest.raises(ValueError):
            addresses.check_peer_id(wrong)


def test_wildcards_become_interface_addresses():
    hosts = [("ip4", "0.0.0.0"), ("ip4", "127.0.0.1"), ("ip6", "::"), ("ip4", "10.1.1.1")]
    listen = [Address(kind, where, 4001 + index) for index, (kind, where) in enumerate(hosts)]
    interfaces = [
        "127.0.0.1",
        "192.168.1.5",
        "10.0.0.2",
        "::1",
        "fd00::7",
        "fe80::1",
        "169.254.3.3",
    ]
    assert [str(each) for each in concrete_addresses(listen, interfaces)] == [
        "/ip4/127.0.0.1/tcp/4001",
        "/ip4/192.168.1.5/tcp/4001",
        "/ip4/10.0.0.2/tcp/4001",
        "/ip4/127.0.0.1/tcp/4002",
        "/ip6/::1/tcp/4003",
        "/ip6/fd00::7/tcp/4003",
        "/ip4/10.1.1.1/tcp/4004",
    ]

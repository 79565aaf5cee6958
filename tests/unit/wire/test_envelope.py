"""Signatures, peer ids and content ids."""

import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.generate import frames
from swarmnode.errors import BadMessage
from swarmnode.wire import codec, envelope, limits
from swarmnode.wire.ids import DOMAIN_ROLLOUT
from tests.support.unseal import unseal

DOMAIN, SWARM, KEY = DOMAIN_ROLLOUT, frames.SWARM, frames.KEY
SIGNED = envelope.sign(b"payload", KEY, DOMAIN, SWARM)
GROUP = codec.decode_payload(
    envelope.Envelope(key=b"", payload=frames.pack(frames.GROUP), signature=b"")
)


@pytest.mark.parametrize(
    ("ids", "kept_as"), [(bytes(2**16), "zstd"), (random.Random(0).randbytes(2**16), "raw")]
)
def test_seal_compresses_only_if_shorter(ids, kept_as):
    one = msgspec.structs.replace(GROUP.completions[0], tokens=2**14, token_ids=ids)
    group = msgspec.structs.replace(
        GROUP,
        completions=[one, GROUP.completions[1]],
        sampling=msgspec.structs.replace(GROUP.sampling, max_tokens=2**14),
    )
    frame = envelope.seal(group, KEY, DOMAIN, SWARM)
    opened, message = unseal(frame, DOMAIN, SWARM, limits.GROUP_BYTES)
    payload = codec.encode(group)
    assert (opened.codec, message) == (kept_as, group)
    assert len(opened.payload) == min(len(payload), len(codec.compress(payload)))


def test_signature_is_checked_before_the_payload():
    """Otherwise a forger could make another peer appear to send garbage."""
    forged = codec.encode(msgspec.structs.replace(SIGNED, payload=b"\xc1"))
    with pytest.raises(BadMessage, match="signature"):
        unseal(forged, DOMAIN, SWARM, limits.GROUP_BYTES)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"payload": b"payloae"}, "signature"),
        ({"signature": bytes(64)}, "signature"),
        ({"codec": "zstd"}, "compression"),
    ],
)
def test_uncompressed_envelope_is_minimal(changes, reason):
    frame = codec.encode(SIGNED)
    assert envelope.open_raw(frame, DOMAIN, SWARM, len(frame)) == SIGNED
    other = codec.encode(msgspec.structs.replace(SIGNED, **changes))
    for bad, domain, limit, why in (
        (other, DOMAIN, len(other), reason),
        (frame, b"swarmnode/state/1", len(frame), "signature"),
        (frame, DOMAIN, len(frame) - 1, "oversize"),
    ):
        with pytest.raises(BadMessage) as caught:
            envelope.open_raw(bad, domain, SWARM, limit)
        assert caught.value.reason == why


@given(
    st.text(max_size=80)
    | st.text("123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz", max_size=80)
)
def test_other_text_is_not_a_peer_id(text):
    assert envelope.peer_key(text) is None
    assert envelope.peer_key("1" + text) is None

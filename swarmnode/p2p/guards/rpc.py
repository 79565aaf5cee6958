"""What one pubsub RPC of a peer may contain, and how many messages per second it may bring.
Pure."""

from collections.abc import Collection

from google.protobuf.message import DecodeError
from libp2p.pubsub.pb import rpc_pb2

from swarmnode.p2p.guards.counting import fired

MESSAGES_PER_RPC = 256
TOPIC_BYTES = 128
RECORD_BYTES = 4096
"""A forwarder's signed record of its own addresses, which rides on every RPC; ours is below 300."""
ID_BYTES = 80
"""Message ids and peer ids; ours are 46 and 38 bytes long."""
IDS_PER_RPC = 512
CONTROLS_PER_RPC = 32
SUBSCRIPTIONS_PER_RPC = 128
BACK_OFF_SECONDS = 600
"""A peer may keep us out of its mesh for this long at a time."""
FORWARDER_RATE = 200.0
"""Messages per second that one forwarder may bring for long; it is made to wait, nothing is
dropped."""
FORWARDER_BURST = 400.0


class Undecodable(Exception):
    """Raised for bytes that are not an RPC."""


class Pace:
    """A token bucket that tells how long to wait instead of refusing. Times in seconds on the
    caller's clock."""

    def __init__(self, now: float) -> None:
        self.tokens, self.at = FORWARDER_BURST, now

    def wait(self, messages: int, now: float) -> float:
        """Seconds after which `messages` more are within the rate."""
        self.tokens = (
            min(FORWARDER_BURST, self.tokens + (now - self.at) * FORWARDER_RATE) - messages
        )
        self.at = now
        return max(0.0, -self.tokens / FORWARDER_RATE)


def parse(frame: bytes, topics: Collection[str]) -> rpc_pb2.RPC:
    """The RPC in `frame`, cut down to what an honest peer would send about `topics`; raises
    `Undecodable`.

    Defects: bytes that are no protobuf raise `DecodeError` through the stream handler (process
    ends); one RPC of 1 MiB may carry 50,000 messages, each of which becomes a task, or ask 20,000
    times for the same cached message (1 GB answer); IHAVE, PRUNE and subscriptions for invented
    topics of any length are remembered. Here: counts, lengths and topics are bounded before
    anything is done. Cost: a copy of the control part. Not needed any more when upstream has such
    limits, as js-libp2p's decodeRpcLimits.
    """
    rpc = rpc_pb2.RPC()
    try:
        rpc.ParseFromString(frame)
    except (DecodeError, UnicodeDecodeError) as error:
        raise Undecodable(str(error)) from error
    before = len(rpc.publish) + len(rpc.subscriptions)
    del rpc.publish[MESSAGES_PER_RPC:]
    del rpc.subscriptions[SUBSCRIPTIONS_PER_RPC:]
    for index in reversed(range(len(rpc.subscriptions))):
        if len(rpc.subscriptions[index].topicid) > TOPIC_BYTES:
            del rpc.subscriptions[index]
    oversize = len(rpc.senderRecord) > RECORD_BYTES
    if oversize:
        rpc.ClearField("senderRecord")
    if oversize or before != len(rpc.publish) + len(rpc.subscriptions):
        fired("rpc_bounded")
    if rpc.HasField("control"):
        control = _bounded_control(rpc.control, topics)
        rpc.control.CopyFrom(control)
    return rpc


def _ids(wanted: Collection[bytes]) -> list[bytes]:
    """Distinct ids of a plausible length, at most `IDS_PER_RPC`."""
    return [one for one in dict.fromkeys(wanted) if len(one) <= ID_BYTES][:IDS_PER_RPC]


def _bounded_control(
    control: rpc_pb2.ControlMessage, topics: Collection[str]
) -> rpc_pb2.ControlMessage:
    out = rpc_pb2.ControlMessage()
    for ihave in control.ihave[:CONTROLS_PER_RPC]:
        if ihave.topicID in topics:
            out.ihave.add(topicID=ihave.topicID, messageIDs=_ids(ihave.messageIDs))
    wanted = _ids(
        [
            one
            for iwant in control.iwant[:CONTROLS_PER_RPC]
            for one in iwant.messageIDs[:IDS_PER_RPC]
        ]
    )
    if wanted:
        out.iwant.add(messageIDs=wanted)
    for graft in control.graft[:CONTROLS_PER_RPC]:
        if graft.topicID in topics:
            out.graft.add(topicID=graft.topicID)
    for prune in control.prune[:CONTROLS_PER_RPC]:
        if prune.topicID in topics:  # the peers it offers are left out: we have our own peer table
            out.prune.add(topicID=prune.topicID, backoff=min(prune.backoff, BACK_OFF_SECONDS))
    for unwanted in control.idontwant[:CONTROLS_PER_RPC]:
        out.idontwant.add(messageIDs=_ids(unwanted.messageIDs))
    return out

"""Bulk transfers: large content, such as tensors, fetched from a peer in verified chunks.

The serving peer:

    network.bulk.offer(transfer, BulkSource.from_file(path))

The requesting peer (a sink refuses a manifest above its limit before it allocates anything):

    manifest = await network.bulk.manifest(peer, transfer, deadline=10)
    sink = MemorySink(manifest, limit=limit_bytes)
    deadline = network.bulk.deadline(peer, manifest.size)
    await network.bulk.fetch(peer, transfer, manifest, sink, deadline=deadline)

service.py is the entry point and the requesting side, serving.py the serving side. content.py holds
sources and sinks. protocol/05-bulk.md specifies the messages, docs/networking.md
lists the limits.
"""

from swarmnode.p2p.api import Declined
from swarmnode.p2p.bulk.content import BulkSink, BulkSource, FileSink, MemorySink
from swarmnode.p2p.bulk.service import BulkStatistics, Libp2pBulk

__all__ = [
    "BulkSink",
    "BulkSource",
    "BulkStatistics",
    "Declined",
    "FileSink",
    "Libp2pBulk",
    "MemorySink",
]

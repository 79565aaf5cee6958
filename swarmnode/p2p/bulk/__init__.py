"""Bulk transfers: something large, such as tensors, pulled from a peer in verified chunks. Knows nothing of what the bytes mean.

    network.bulk.offer(transfer, BulkSource.from_file(path))                                 the peer that has it
    manifest = await network.bulk.manifest(peer, transfer, deadline=10)                      the peer that wants it
    sink = MemorySink(manifest, limit=…)                                                     refuses before it allocates
    await network.bulk.fetch(peer, transfer, manifest, sink, deadline=network.bulk.deadline(peer, manifest.size))

service.py decides and counts; fetching.py and serving.py do either side's work; socket.py and listener.py the TLS connection beside libp2p,
content.py what is sent and where it goes, bandwidth.py how long it may take. protocol/05-bulk.md is what travels, docs/bulk.md why.
"""

from swarmnode.p2p.api import Declined
from swarmnode.p2p.bulk.bandwidth import Bandwidth
from swarmnode.p2p.bulk.content import BulkSink, BulkSource, FileSink, MemorySink
from swarmnode.p2p.bulk.service import Bulk, BulkStatistics

__all__ = ["Bandwidth", "Bulk", "BulkSink", "BulkSource", "BulkStatistics", "Declined", "FileSink", "MemorySink"]

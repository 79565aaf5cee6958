"""Bulk transfers: something large, such as tensors, pulled from a peer in verified chunks. Knows
nothing of what the bytes mean.

    network.bulk.offer(transfer, BulkSource.from_file(path))                                 the
    peer that has it
    manifest = await network.bulk.manifest(peer, transfer, deadline=10)                      the
    peer that wants it
    sink = MemorySink(manifest, limit=…)                                                     refuses
    before it allocates
    await network.bulk.fetch(peer, transfer, manifest, sink, deadline=network.bulk.deadline(peer,
    manifest.size))

service.py holds both sides together: fetcher.py decides and counts what we fetch, fetching.py does
it; serving.py has what others fetch; calling.py, listener.py and tls.py are the TLS connection
beside libp2p, content.py what is sent and where it goes, bandwidth.py how long it may take.
protocol/05-bulk.md is what travels, docs/bulk.md why.
"""

from swarmnode.p2p.api import Declined
from swarmnode.p2p.bulk.bandwidth import Bandwidth
from swarmnode.p2p.bulk.content import BulkSink, BulkSource, FileSink, MemorySink
from swarmnode.p2p.bulk.service import BulkStatistics, Libp2pBulk

__all__ = [
    "Bandwidth",
    "BulkSink",
    "BulkSource",
    "BulkStatistics",
    "Declined",
    "FileSink",
    "Libp2pBulk",
    "MemorySink",
]

"""Discovers peers on the local network by multicast DNS, off the trio thread.

    zeroconf's threads ─ (peer id, address) ─▶ run_sync_soon ─▶ trio thread ─▶ peer table

The library's mDNS blocks the event loop for 1.65 s at each start and advertises 0.0.0.0. Here
zeroconf starts and stops in a worker thread, its results cross threads in one direction, and only
concrete addresses of this machine are advertised. A node that listens on loopback only does not use
mDNS. Every failure is a warning, because a node also works without mDNS.
"""

from __future__ import annotations

import hashlib
import logging
import socket
from collections.abc import Callable, Iterable

import trio
from zeroconf import IPVersion, ServiceBrowser, ServiceInfo, ServiceStateChange, Zeroconf

from swarmnode.p2p import addresses, listening
from swarmnode.p2p.addresses import LOOPBACK, Address

log = logging.getLogger(__name__)

RESOLVE_MILLISECONDS = 3000
FOUND_ADDRESSES = 4
PENDING = 64
"""Maximum number of announcements waiting for the trio thread; further ones are dropped."""

PeerFound = Callable[[str, str], None]
"""Called with (peer id, address without peer id) on the trio thread."""


def service_type(swarm: bytes) -> str:
    """Return the DNS-SD type of one swarm, so that nodes of other swarms are not discovered. The
    name has 9 of the 15 characters that RFC 6763 allows."""
    return f"_sn-{hashlib.blake2b(swarm, digest_size=3).hexdigest()[:6]}._tcp.local."


def parse_service(
    properties: dict[bytes, bytes | None], hosts: Iterable[str], port: int | None
) -> list[tuple[str, str]]:
    """Return (peer id, address) pairs of an announcement, an unverified claim of any LAN device.
    Raises ValueError if it is not of a swarmnode peer."""
    peer = addresses.check_peer_id((properties.get(b"id") or b"").decode())
    found = []
    for host in list(hosts)[:FOUND_ADDRESSES]:
        address = addresses.from_socket(host, port or 0)
        if addresses.dialable(address, None):
            found.append((peer, str(address)))
    return found


class MdnsDiscovery:
    """Announces this node and discovers peers while `run` runs.

    Args:
        own: peer id of this node.
        swarm: swarm id.
        listen: listening addresses.
        interfaces: IP addresses to send on; None for all. Tests use loopback.
    """

    def __init__(
        self, own: str, swarm: bytes, listen: list[Address], *, interfaces: list[str] | None = None
    ) -> None:
        self._own = own
        self._type = service_type(swarm)
        self._found: PeerFound = lambda peer, address: None
        self._interfaces = interfaces
        self._listen = listen
        self._pending = 0
        self._token: trio.lowlevel.TrioToken | None = None

    async def run(self, found: PeerFound) -> None:
        """Call `found` for every announced peer until cancelled. Never raises for a fault of the
        network."""
        self._found = found
        self._token = trio.lowlevel.current_trio_token()
        own_addresses = self._listen
        if not self._interfaces:
            interfaces = await trio.to_thread.run_sync(listening.interface_addresses)
            concrete = listening.concrete_addresses(self._listen, interfaces)
            own_addresses = [each for each in concrete if each.scope != LOOPBACK]
        if not own_addresses:
            log.info("mDNS: only loopback addresses, nothing to announce")
            return
        try:
            zeroconf, browser = await trio.to_thread.run_sync(self._open, own_addresses)
        except Exception as error:  # noqa: BLE001
            # zeroconf and the system raise many types: no multicast, no interface, port 5353 in
            # use, …
            log.warning(
                "mDNS is not available, peers on the local network are not discovered: %s",
                error,
            )
            return
        try:
            await trio.sleep_forever()
        finally:
            with trio.CancelScope(shield=True), trio.move_on_after(5.0):
                await trio.to_thread.run_sync(
                    self._close, zeroconf, browser, abandon_on_cancel=True
                )

    def _open(self, own_addresses: list[Address]) -> tuple[Zeroconf, ServiceBrowser]:
        """Start zeroconf; runs in a worker thread."""
        zeroconf = (
            Zeroconf(interfaces=self._interfaces)
            if self._interfaces
            else Zeroconf(ip_version=IPVersion.V4Only)
        )
        try:
            zeroconf.register_service(self._service(own_addresses))
            return zeroconf, ServiceBrowser(zeroconf, self._type, handlers=[self._changed])
        except BaseException:
            zeroconf.close()
            raise

    def _service(self, own_addresses: list[Address]) -> ServiceInfo:
        name = self._own[-16:]
        return ServiceInfo(
            self._type,
            f"{name}.{self._type}",
            addresses=[
                socket.inet_pton(
                    socket.AF_INET if each.kind == "ip4" else socket.AF_INET6, each.host
                )
                for each in own_addresses
            ],
            port=own_addresses[0].port,
            properties={"id": self._own},
            server=f"{name}.local.",
        )

    @staticmethod
    def _close(zeroconf: Zeroconf, browser: ServiceBrowser) -> None:
        browser.cancel()
        zeroconf.close()

    def _changed(
        self, zeroconf: Zeroconf, service_type: str, name: str, state_change: ServiceStateChange
    ) -> None:
        """Handle an announcement; runs on zeroconf's browser thread."""
        if state_change is ServiceStateChange.Removed or self._pending >= PENDING:
            return
        info = zeroconf.get_service_info(service_type, name, timeout=RESOLVE_MILLISECONDS)
        if info is None:
            return
        try:
            found = parse_service(info.properties, info.parsed_addresses(), info.port)
        except ValueError:
            return
        for peer, address in found:
            if peer != self._own:
                self._send_to_trio(peer, address)

    def _send_to_trio(self, peer: str, address: str) -> None:
        self._pending += 1
        try:
            self._token.run_sync_soon(self._receive_on_trio, peer, address)  # type: ignore[union-attr]
        except trio.RunFinishedError:
            log.debug("mDNS found %s after shutdown", peer)

    def _receive_on_trio(self, peer: str, address: str) -> None:
        self._pending -= 1
        self._found(peer, address)

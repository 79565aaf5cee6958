"""Finds peers on the local network by multicast DNS, off the trio thread.

    zeroconf's own threads ─ (peer id, address) ─▶ run_sync_soon ─▶ trio thread ─▶ peer table

The library's mDNS blocks the loop for 1.65 s at each start and advertises 0.0.0.0. Here zeroconf
starts and stops in a worker thread, what it finds crosses over one way, and only concrete addresses
of this machine are told. A node that listens on loopback alone has nothing to tell a LAN, and does
nothing. Anything that fails is a warning: a node without mDNS is a node.
"""

from __future__ import annotations

import hashlib
import ipaddress
import logging
import socket
from collections.abc import Callable, Iterable

import ifaddr
import trio
from zeroconf import IPVersion, ServiceBrowser, ServiceInfo, ServiceStateChange, Zeroconf

from swarmnode.p2p import addresses
from swarmnode.p2p.addresses import LOOPBACK, Address

log = logging.getLogger(__name__)

RESOLVE_MILLISECONDS = 3000
FOUND_ADDRESSES = 4
PENDING = 64
"""Announcements that may wait for the trio thread; a LAN that shouts louder is not listened to."""

Found = Callable[[str, str], None]
"""(peer id, address without it), on the trio thread."""


def service_type(swarm: bytes) -> str:
    """DNS-SD type of one swarm: nodes of another one do not even hear of us. 9 characters of name,
    of which RFC 6763 allows 15."""
    return f"_sn-{hashlib.blake2b(swarm, digest_size=3).hexdigest()[:6]}._tcp.local."


def advertised(listen: Iterable[Address], interfaces: Iterable[str]) -> list[Address]:
    """The addresses to tell the LAN: listen addresses as they are, 0.0.0.0 and :: as each address
    of `interfaces`; no loopback."""
    own = [ipaddress.ip_address(text) for text in interfaces]
    found = []
    for address in listen:
        ip = address.ip
        if ip is None:
            continue
        candidates = (
            [each for each in own if each.version == ip.version] if ip.is_unspecified else [ip]
        )
        found += [Address(address.kind, str(each), address.port) for each in candidates]
    return list(
        dict.fromkeys(
            each
            for each in found
            if each.scope != LOOPBACK and each.ip is not None and not each.ip.is_link_local
        )
    )


def interface_addresses() -> list[str]:
    """Every IP address of this machine, IPv6 without its zone."""
    return [
        str(ip.ip if ip.is_IPv4 else ip.ip[0])
        for adapter in ifaddr.get_adapters()
        for ip in adapter.ips
    ]


def parse_service(
    properties: dict[bytes, bytes | None], hosts: Iterable[str], port: int | None
) -> list[tuple[str, str]]:
    """(peer id, address) of an announcement, a claim by anybody on the LAN. Raises ValueError if it
    is not one of ours."""
    peer = addresses.check_peer_id((properties.get(b"id") or b"").decode())
    found = []
    for host in list(hosts)[:FOUND_ADDRESSES]:
        address = addresses.from_socket(host, port or 0)
        if addresses.dialable(address, None):
            found.append((peer, str(address)))
    return found


class MdnsDiscovery:
    """Announces us and listens for others while `run` runs. `interfaces`: IP addresses to send on,
    None for all; loopback only in tests."""

    def __init__(
        self, own: str, swarm: bytes, listen: list[Address], *, interfaces: list[str] | None = None
    ) -> None:
        self._own = own
        self._type = service_type(swarm)
        self._found: Found = lambda peer, address: None
        self._interfaces = interfaces
        self._listen = listen
        self._pending = 0
        self._token: trio.lowlevel.TrioToken | None = None
        self.running = False

    async def run(self, found: Found) -> None:
        """Calls `found` with everybody who is announced, until cancelled. Never raises for anything
        the network does."""
        self._found = found
        self._token = trio.lowlevel.current_trio_token()
        told = (
            self._listen
            if self._interfaces
            else advertised(self._listen, await trio.to_thread.run_sync(interface_addresses))
        )
        if not told:
            log.info("mDNS: only loopback addresses, nothing to announce")
            return
        try:
            zeroconf, browser = await trio.to_thread.run_sync(self._open, told)
        except Exception as error:  # noqa: BLE001
            # no multicast, no interface, port 5353 taken, …: zeroconf and the OS raise many kinds
            log.warning(
                "mDNS is not available, peers on the local network are not found by themselves: %s",
                error,
            )
            return
        try:
            self.running = True
            await trio.sleep_forever()
        finally:
            self.running = False
            with trio.CancelScope(shield=True), trio.move_on_after(5.0):
                await trio.to_thread.run_sync(
                    self._close, zeroconf, browser, abandon_on_cancel=True
                )

    def _open(self, told: list[Address]) -> tuple[Zeroconf, ServiceBrowser]:
        """In a worker thread."""
        zeroconf = (
            Zeroconf(interfaces=self._interfaces)
            if self._interfaces
            else Zeroconf(ip_version=IPVersion.V4Only)
        )
        try:
            zeroconf.register_service(self._service(told))
            return zeroconf, ServiceBrowser(zeroconf, self._type, handlers=[self._changed])
        except BaseException:
            zeroconf.close()
            raise

    def _service(self, told: list[Address]) -> ServiceInfo:
        name = self._own[-16:]
        return ServiceInfo(
            self._type,
            f"{name}.{self._type}",
            addresses=[
                socket.inet_pton(
                    socket.AF_INET if each.kind == "ip4" else socket.AF_INET6, each.host
                )
                for each in told
            ],
            port=told[0].port,
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
        """On zeroconf's browser thread."""
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
                self._cross(peer, address)

    def _cross(self, peer: str, address: str) -> None:
        self._pending += 1
        try:
            self._token.run_sync_soon(self._arrive, peer, address)  # type: ignore[union-attr]
        except trio.RunFinishedError:
            log.debug("mDNS found %s after the end", peer)

    def _arrive(self, peer: str, address: str) -> None:
        self._pending -= 1
        self._found(peer, address)

"""The address of a node's HTTP server: typed by the operator, or read from a data directory."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from swarmnode.config import HttpConfig
from swarmnode.errors import ConfigError, Unavailable

ADDRESS = re.compile(r"(https?://)?(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::(\d{1,5}))?/?")


@dataclass(frozen=True)
class NodeAddress:
    url: str
    peer: str = ""
    """Peer id of the node that must answer; empty for any node."""


def parse_address(text: str) -> NodeAddress:
    """Return the address of a HOST:PORT or URL. Raises ConfigError."""
    match = ADDRESS.fullmatch(text)
    scheme, host, port = match.groups() if match is not None else (None, "", None)
    if match is None or int(port or 0) > 65535 or (scheme is None and port is None):
        raise ConfigError(
            f"{text[:120]}: not an address such as 127.0.0.1:9464 or http://127.0.0.1:9464"
        )
    return NodeAddress(f"{scheme or 'http://'}{host}{':' if port else ''}{port or ''}")


def require_address(data_dir: Path) -> NodeAddress:
    """Return the address that the node of a data directory wrote at its last start.

    Raises:
        Unavailable: no node has run there, or it has no status page.
    """
    address = read_address(data_dir)
    if address is None:
        raise Unavailable(
            f"no node has run in {data_dir} yet, or it has no status page: set another -d DIR, or"
            " HOST:PORT of its page"
        )
    return address


def read_address(data_dir: Path) -> NodeAddress | None:
    """Return the address that the node of a data directory wrote; None if there is no valid one."""
    try:
        written = json.loads((data_dir / "run" / "addresses.json").read_bytes())
        url, peer = written["http"], written.get("peer", "")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return (
        NodeAddress(local_url(url), peer)
        if isinstance(url, str) and url and isinstance(peer, str)
        else None
    )


def configured_address(http: HttpConfig) -> NodeAddress:
    """Return the address of a node with this configuration."""
    host = f"[{http.host}]" if ":" in http.host else http.host
    return NodeAddress(local_url(f"http://{host}:{http.port or HttpConfig().port}"))


def local_url(url: str) -> str:
    """Replace the address of all interfaces by this machine's loopback address."""
    return url.replace("//0.0.0.0", "//127.0.0.1").replace("//[::]", "//[::1]")

"""Where a node's HTTP server is: as somebody typed it, or as the node itself wrote it into its data
directory."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from swarmnode.config import HttpConfig
from swarmnode.errors import ConfigError, Unavailable

ADDRESS = re.compile(r"(https?://)?(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::(\d{1,5}))?/?")


@dataclass(frozen=True)
class Place:
    url: str
    peer: str = ""
    """Peer id of the node that has to answer there; empty: whoever does."""


def typed(text: str) -> Place:
    """HOST:PORT or a URL. Raises ConfigError."""
    match = ADDRESS.fullmatch(text)
    scheme, host, port = match.groups() if match is not None else (None, "", None)
    if match is None or int(port or 0) > 65535 or (scheme is None and port is None):
        raise ConfigError(
            f"{text[:120]}: not an address such as 127.0.0.1:9464 or http://127.0.0.1:9464"
        )
    return Place(f"{scheme or 'http://'}{host}{':' if port else ''}{port or ''}")


def of_data_dir(data_dir: Path) -> Place:
    """What the node of this directory wrote when it last started. Raises Unavailable where none
    did."""
    place = written(data_dir)
    if place is None:
        raise Unavailable(
            f"no node has run in {data_dir} yet, or it has no status page: name another -d DIR, or"
            " HOST:PORT of its page"
        )
    return place


def written(data_dir: Path) -> Place | None:
    """The same; None where there is nothing, or nonsense."""
    try:
        told = json.loads((data_dir / "run" / "addresses.json").read_bytes())
        url, peer = told["http"], told.get("peer", "")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return (
        Place(reachable(url), peer)
        if isinstance(url, str) and url and isinstance(peer, str)
        else None
    )


def configured(http: HttpConfig) -> Place:
    """Where a node with this configuration answers."""
    host = f"[{http.host}]" if ":" in http.host else http.host
    return Place(reachable(f"http://{host}:{http.port or HttpConfig().port}"))


def reachable(url: str) -> str:
    """The same, where a server that listens on every interface is asked on this machine's own."""
    return url.replace("//0.0.0.0", "//127.0.0.1").replace("//[::]", "//[::1]")

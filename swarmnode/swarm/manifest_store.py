"""The manifests in `<data_dir>/manifest`: the current one, its predecessors, and a known successor.

    <swarm id in hex>.manifest   the signed envelope, as received
    current                      swarm id of the manifest in use
    peers                        multiaddrs of the last invite, one per line, because the manifest's
                                 own addresses may be outdated

Everything is verified again when it is read, so that a damaged or altered file is an error, not
another swarm.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from swarmnode import settings
from swarmnode.config import Config
from swarmnode.errors import BadMessage, ConfigError, StateError, Unavailable
from swarmnode.files import write_file
from swarmnode.swarm import manifest
from swarmnode.swarm.invite import check_addresses
from swarmnode.swarm.manifest import Change
from swarmnode.swarm.requirements import can_honour, refuse_if_any
from swarmnode.wire import limits
from swarmnode.wire.manifest import VerifiedManifest, follows, open_manifest

CURRENT = "current"
PEERS = "peers"
MAX_MANIFESTS = 256
"""Maximum number of manifests read from a directory. A node adds one per adopted successor and one
for a pending successor."""


class ManifestStore:
    """Manifests on disk. Every write may raise Unavailable; every read of a damaged file raises
    StateError."""

    def __init__(self, data_dir: Path) -> None:
        self._directory = data_dir / "manifest"

    def current(self) -> bytes | None:
        """Return the swarm id in use, None if none was chosen."""
        try:
            return bytes.fromhex((self._directory / CURRENT).read_text().strip())
        except FileNotFoundError:
            return None
        except NotADirectoryError:
            raise Unavailable(
                f"data directory {self._directory.parent} cannot be used: it is not a directory"
            ) from None
        except OSError as error:
            raise StateError(f"cannot read {self._directory / CURRENT}: {error.strerror}") from None
        except ValueError:
            raise StateError(
                f"{self._directory / CURRENT} does not hold a swarm id; join again"
            ) from None

    def get(self, swarm: bytes) -> VerifiedManifest | None:
        """Return the manifest of `swarm`, None if it is not stored."""
        path = self.path(swarm)
        try:
            data = path.read_bytes()[: limits.MANIFEST_BYTES + 1]
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StateError(f"cannot read {path}: {error.strerror}") from None
        try:
            opened = open_manifest(data)
        except BadMessage as error:
            raise StateError(f"{path} is damaged ({error}); remove it and join again") from None
        if opened.swarm != swarm:
            raise StateError(f"{path} holds another swarm's manifest; remove it and join again")
        return opened

    def path(self, swarm: bytes) -> Path:
        return self._directory / f"{swarm.hex()}.manifest"

    def add(self, opened: VerifiedManifest) -> None:
        """Store a manifest."""
        write_file(self.path(opened.swarm), opened.signed)

    def choose(self, swarm: bytes) -> None:
        """Use this manifest from now on. A running node restarts with it within seconds."""
        write_file(self._directory / CURRENT, f"{swarm.hex()}\n".encode())

    def save_peers(self, addresses: Sequence[str]) -> None:
        """Store the addresses of an invite for the next start."""
        write_file(
            self._directory / PEERS, "".join(f"{address}\n" for address in addresses).encode()
        )

    def peers(self) -> list[str]:
        """Return the addresses of the last invite; empty if there are none or they cannot be read,
        which does not prevent a start."""
        try:
            return list(check_addresses((self._directory / PEERS).read_text().split(), PEERS))
        except (OSError, ValueError, ConfigError):
            return []

    def successor(self, opened: VerifiedManifest) -> VerifiedManifest | None:
        """Return the best stored successor: the newest, then the one with the greater id."""
        found = [other for other in self._all() if follows(other, opened)]
        return max(found, key=_rank, default=None)

    def add_successor(self, opened: VerifiedManifest, successor: VerifiedManifest) -> bool:
        """Store a successor of `opened` in place of an older unused one. Returns True if it was
        new."""
        before = self.successor(opened)
        if before is not None and _rank(before) >= _rank(successor):
            return False
        self.add(successor)
        if before is not None and before.swarm != self.current():
            self.path(before.swarm).unlink(missing_ok=True)
        return True

    def latest(self, swarm: bytes) -> VerifiedManifest | None:
        """Return the last manifest of the chain of successors that starts at `swarm`."""
        opened = self.get(swarm)
        while opened is not None and (following := self.successor(opened)) is not None:
            opened = following  # terminates, because each successor is newer
        return opened

    def descends(self, swarm: bytes, ancestor: bytes) -> bool:
        """Return True if `swarm` is `ancestor` or descends from it, according to the stored
        manifests."""
        for _ in range(MAX_MANIFESTS):
            if swarm == ancestor:
                return True
            opened = self.get(swarm)
            if opened is None or not opened.manifest.predecessor:
                return False
            swarm = opened.manifest.predecessor
        return False

    def lookup(self, swarm: bytes) -> tuple[bytes, bytes]:
        """Return (signed manifest, signed successor) for the manifest protocol, each empty if not
        stored. Never raises."""
        opened, successor = self._pair(swarm)
        return opened.signed if opened else b"", successor.signed if successor else b""

    def successor_id(self, swarm: bytes) -> bytes:
        """Return the swarm id of the best stored successor of a manifest; empty without one. Never
        raises."""
        _, successor = self._pair(swarm)
        return successor.swarm if successor is not None else b""

    def _pair(self, swarm: bytes) -> tuple[VerifiedManifest | None, VerifiedManifest | None]:
        """Return the readable manifest of `swarm` and its best successor."""
        try:
            opened = self.get(swarm)
            return opened, self.successor(opened) if opened is not None else None
        except StateError:
            return None, None

    def _all(self) -> list[VerifiedManifest]:
        names = sorted(path.stem for path in self._directory.glob("*.manifest"))[:MAX_MANIFESTS]
        return [
            opened
            for name in names
            if len(name) == 64 and (opened := self.get(bytes.fromhex(name))) is not None
        ]


def _rank(opened: VerifiedManifest) -> tuple[int, bytes]:
    return opened.manifest.created_at, opened.swarm


def load_current(data_dir: Path) -> VerifiedManifest | None:
    """Return the manifest in use in this data directory; None for a swarm without one. Raises
    StateError if it is missing."""
    store = ManifestStore(data_dir)
    swarm = store.current()
    if swarm is None:
        return None
    opened = store.get(swarm)
    if opened is None:
        raise StateError(
            f"the manifest of swarm {swarm.hex()} is not in {data_dir / 'manifest'}: join again"
        )
    return opened


def apply_stored(config: Config, *, trains: bool = True) -> tuple[Config, Sequence[Change]]:
    """Return `config` with the terms of the stored manifest, and the changes; unchanged without a
    manifest.

    Raises:
        Refused: this node cannot honour the manifest; the message has every reason.
    """
    data_dir = config.node.data_dir
    opened = load_current(data_dir)
    if opened is None:
        if trains and config.sharing.enabled:
            manifest.refuse_environments(
                config.task.names,
                "the swarm is private (init --private); sharing.enabled = false trains alone",
            )
        return config, []
    refuse_if_any(can_honour(opened.manifest, config, trains=trains), opened)
    peers = dict.fromkeys([*config.network.initial_peers, *ManifestStore(data_dir).peers()])
    known = settings.replaced(config, {"network.initial_peers": list(peers)}, str(data_dir))
    return manifest.apply_terms(known, opened, trains=trains)

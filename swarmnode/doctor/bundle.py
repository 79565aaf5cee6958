"""`swarmnode doctor --bundle`: an archive for a bug report, without secrets.

    versions.json   versions of swarmnode, Python, important packages and the system
    doctor.json     the doctor's verdicts
    config.json     all settings with value and origin
    status.json     the running node's status; absent if no node is running
    log/*.jsonl     the last lines of each process's log

All texts pass through `Redaction`, which knows the values of this node's secrets. An archive that
would still contain one is not written. Peer ids and addresses are included, because most problems
cannot be diagnosed without them.
"""

from __future__ import annotations

import base64
import contextlib
import importlib.metadata
import io
import json
import os
import platform
import re
import tarfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from swarmnode import __version__
from swarmnode.config import Config
from swarmnode.doctor.checks import Check
from swarmnode.errors import Refused, Unavailable
from swarmnode.observe import address
from swarmnode.observe.logs import HIDDEN, SECRET_KEY, SECRET_TEXT
from swarmnode.observe.top import fetch
from swarmnode.settings import Resolved

LOG_BYTES = 2**18
"""Bytes from the end of each log: some thousand lines."""
KEY_BYTES = 4096
PACKAGES = (
    "libp2p",
    "trio",
    "cryptography",
    "msgspec",
    "pydantic",
    "torch",
    "transformers",
    "accelerate",
    "peft",
    "safetensors",
    "numpy",
    "reasoning-gym",
    "huggingface-hub",
    "cyclopts",
    "structlog",
)
SECRET_VARIABLE = re.compile(r"KEY|TOKEN|SECRET|PASS|CREDENTIAL|AUTH|COOKIE", re.IGNORECASE)
LEAST_SECRET = 6
"""Minimum length of a secret in characters. Shorter values occur in ordinary text."""
INVITE = re.compile(r"[^\s\"']*/swarm/[0-9a-fA-F]{64}")
"""An invite names the swarm and its peers, which should stay private for a private swarm."""
USERINFO = re.compile(r"(?<=://)[^/\s\"'@]+@")
PRIVATE_SETTINGS = ("swarm.invite",)


class Redaction:
    """Removes secrets from texts.

    Args:
        secrets: Values to remove in every spelling.
    """

    def __init__(self, secrets: Iterable[str]) -> None:
        known = {each.strip() for each in secrets if len(each.strip()) >= LEAST_SECRET}
        known |= {json.dumps(each)[1:-1] for each in known}  # the spelling inside of JSON
        self._secrets = sorted(known, key=len, reverse=True)

    def text(self, text: str) -> str:
        """Return a text without secrets."""
        for secret in self._secrets:
            text = text.replace(secret, HIDDEN)
        text = SECRET_TEXT.sub(HIDDEN, text)
        return USERINFO.sub(f"{HIDDEN}@", INVITE.sub("[invite]", text))

    def value(self, found: object) -> object:
        """Return a tree without secrets. Strings under a key that names a secret are removed
        too."""
        if isinstance(found, Mapping):
            return {
                self.text(str(key)): HIDDEN
                if SECRET_KEY.search(str(key)) and isinstance(value, str) and value
                else self.value(value)
                for key, value in found.items()
            }
        if isinstance(found, str):
            return self.text(found)
        if isinstance(found, Sequence) and not isinstance(found, bytes):
            return [self.value(each) for each in found]
        return (
            found
            if found is None or isinstance(found, bool | int | float)
            else self.text(str(found))
        )

    def leaks(self, data: bytes) -> bool:
        """Return True if `data` contains a secret."""
        return any(secret.encode() in data for secret in self._secrets)


def find_secrets(data_dir: Path, environment: Mapping[str, str]) -> list[str]:
    """Return the keys, swarm secrets and tokens of this node in all spellings: hex, base64, PEM
    lines."""
    found = [value for name, value in environment.items() if SECRET_VARIABLE.search(name)]
    files = [
        *data_dir.glob("*.key"),
        *data_dir.glob("*.secret"),
        Path(os.path.expanduser("~/.cache/huggingface/token")),
    ]
    for file in files:
        with contextlib.suppress(OSError):
            with file.open("rb") as opened:
                data = opened.read(KEY_BYTES)
            found += _spellings(data)
    return found


def _spellings(data: bytes) -> list[str]:
    text = data.decode(errors="replace").strip()
    lines = [line.strip() for line in text.splitlines() if not line.startswith("-----")]
    raw = data
    with contextlib.suppress(ValueError):
        raw = bytes.fromhex(text)
    if "PRIVATE KEY-----" in text:
        with contextlib.suppress(ValueError):
            # PKCS 8 of an Ed25519 key ends with its seed
            raw = base64.b64decode("".join(lines))[-32:]
    return [
        *lines,
        raw.hex(),
        raw.hex().upper(),
        base64.b64encode(raw).decode(),
        base64.urlsafe_b64encode(raw).decode().rstrip("="),
    ]


def write_bundle(resolved: Resolved | None, checks: Sequence[Check], into: Path) -> Path:
    """Write a new archive that only its owner can read.

    Args:
        resolved: The configuration; None if it is invalid, and no data directory is known.
        checks: The doctor's verdicts.
        into: Directory of the archive.

    Raises:
        Unavailable: The archive cannot be written.
        Refused: The archive would contain a secret.
    """
    config = resolved.config if resolved is not None else Config()
    data_dir = config.node.data_dir
    redaction = Redaction(find_secrets(data_dir, os.environ))
    files: dict[str, object] = {
        "versions.json": _versions(),
        "doctor.json": [asdict(check) for check in checks],
    }
    if resolved is not None:
        files["config.json"] = {
            key: {"value": HIDDEN if key in PRIVATE_SETTINGS and value else value, "origin": origin}
            for key, value, origin in resolved.rows()
        }
        if (status := _status(data_dir)) is not None:
            files["status.json"] = status
    texts = {
        name: json.dumps(redaction.value(each), indent=1, default=str, ensure_ascii=False)
        for name, each in files.items()
    }
    for log in sorted((data_dir / "log").glob("*.jsonl")) if resolved is not None else ():
        texts[f"log/{log.name}"] = "\n".join(_log_line(line, redaction) for line in _tail(log))
    packed = {name: redaction.text(text).encode() for name, text in texts.items()}
    if leaking := [name for name, data in packed.items() if redaction.leaks(data)]:
        raise Refused(
            f"doctor --bundle: {', '.join(leaking)} would contain a secret: nothing was written"
        )
    file = into / time.strftime("swarmnode-bundle-%Y%m%d-%H%M%S.tar.gz")
    try:
        private = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(private, "wb") as out, tarfile.open(fileobj=out, mode="w:gz") as archive:
            for name, data in packed.items():
                entry = tarfile.TarInfo(f"{file.name.removesuffix('.tar.gz')}/{name}")
                entry.size, entry.mtime, entry.mode = len(data), int(time.time()), 0o600
                archive.addfile(entry, io.BytesIO(data))
    except OSError as error:
        raise Unavailable(f"doctor --bundle: cannot write {file}: {error.strerror}") from None
    return file


def _versions() -> dict[str, object]:
    packages = {}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            packages[package] = importlib.metadata.version(package)
    return {
        "swarmnode": __version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "machine": platform.machine(),
        "processors": os.cpu_count(),
        "packages": packages,
        "environment": sorted(
            name for name in os.environ if name.startswith(("SWARMNODE_", "HF_", "CUDA_"))
        ),
    }


def _status(data_dir: Path) -> object:
    """Return the status of the directory's node; None if it does not respond."""
    place = address.read_address(data_dir)
    if place is None:
        return None
    try:
        return fetch(place, points=0)
    except Unavailable:
        return None


def _tail(log: Path) -> list[str]:
    """Return the last complete lines of a log."""
    try:
        with log.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - LOG_BYTES))
            lines = file.read(LOG_BYTES).decode(errors="replace").splitlines()
    except OSError:
        return []
    return lines[1:] if size > LOG_BYTES else lines


def _log_line(line: str, redaction: Redaction) -> str:
    try:
        return json.dumps(redaction.value(json.loads(line)), ensure_ascii=False)
    except ValueError:
        return redaction.text(line)

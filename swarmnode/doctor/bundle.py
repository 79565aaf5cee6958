"""`swarmnode doctor --bundle`: what somebody who helps needs to see of a node, in one archive, and
no secret.

    versions.json   this program, Python, the packages that matter, the system
    doctor.json     what doctor found
    config.json     every setting with its value and origin
    status.json     what the running node says of itself; left out where none runs
    log/*.jsonl     the last lines of each process

Every text goes through `Redaction`, which knows the secrets of this node by their values. An
archive that would still hold one of them is not written. Peer ids and addresses are in it: without
them nobody could help.
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
"""The end of each process's log: some thousand lines."""
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
"""Characters: a shorter value is in every text, and blanking it would blank everything."""
INVITE = re.compile(r"[^\s\"']*/swarm/[0-9a-fA-F]{64}")
"""An invite lets its holder try to come in, and of a private swarm that is not everybody's
business."""
USERINFO = re.compile(r"(?<=://)[^/\s\"'@]+@")
PRIVATE_SETTINGS = ("swarm.invite",)


class Redaction:
    """Texts without what is secret. secrets: values that occur nowhere in what comes out, however
    they are written."""

    def __init__(self, secrets: Iterable[str]) -> None:
        known = {each.strip() for each in secrets if len(each.strip()) >= LEAST_SECRET}
        known |= {json.dumps(each)[1:-1] for each in known}  # as it stands inside a JSON text
        self._secrets = sorted(known, key=len, reverse=True)

    def text(self, text: str) -> str:
        for secret in self._secrets:
            text = text.replace(secret, HIDDEN)
        text = SECRET_TEXT.sub(HIDDEN, text)
        return USERINFO.sub(f"{HIDDEN}@", INVITE.sub("[invite]", text))

    def value(self, found: object) -> object:
        """The same for everything in a tree, and whatever stands under a name that says secret."""
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
        """Whether a secret is in there after all."""
        return any(secret.encode() in data for secret in self._secrets)


def secrets_of(data_dir: Path, environment: Mapping[str, str]) -> list[str]:
    """Keys, swarm secrets and tokens that this node could give away, as they would be written: hex,
    base64, lines of PEM."""
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
    """A new archive in the directory `into`, which only its owner can read. resolved: None where
    there is no valid configuration, and so no data directory to look into.

    Raises Unavailable where it cannot be written, Refused where a secret would be in it.
    """
    config = resolved.config if resolved is not None else Config()
    data_dir = config.node.data_dir
    redaction = Redaction(secrets_of(data_dir, os.environ))
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
            f"doctor --bundle: a secret would stand in {', '.join(leaking)}: nothing was written"
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
    """What the node of this directory says; None where none answers."""
    place = address.read_address(data_dir)
    if place is None:
        return None
    try:
        return fetch(place, points=0)
    except Unavailable:
        return None


def _tail(log: Path) -> list[str]:
    """The last lines, whole ones."""
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

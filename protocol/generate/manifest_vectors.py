"""Vectors of manifests and sessions, for `vectors.py`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from protocol.generate.frames import (
    FORGED_SIGNATURE,
    GROUP,
    KEY,
    OTHER_KEY,
    OTHER_PEER,
    PEER,
    SWARM,
    TASKS,
    Vector,
    accepted,
    changed,
    pack,
    refusals,
    rejected,
    sealed,
)
from swarmnode.wire import ids, limits
from swarmnode.wire.envelope import sign
from swarmnode.wire.manifest import manifest_id


def manifests() -> Iterator[Vector]:
    founder = KEY.public_key().public_bytes_raw()
    model = {
        "name": "embedded",
        "revision": "",
        "fingerprint": b"\x11" * 32,
        "tokenizer": b"\x22" * 32,
    }
    task = {"id": "builtin/copy", "version": TASKS["builtin/copy"], "settings": '{"digits": 3}'}
    other_task = {"id": "rg/chain_sum", "version": TASKS["rg/chain_sum"], "settings": ""}
    rules: dict[str, Any] = {
        "min_completions": 2,
        "max_completions": 16,
        "max_tokens": 64,
        "temperature": 1.0,
        "top_p": 1.0,
        "groups_per_second": 16.0,
    }
    good: dict[str, Any] = {
        "name": "vectors",
        "founder": founder,
        "created_at": 1_790_000_000_000,
        "predecessor": b"",
        "minimum_version": "0.1.0",
        "protocols": list(ids.PROTOCOLS),
        "models": [model],
        "tasks": [task, other_task],
        "rollouts": rules,
        "settings": [{"key": "training.advantage", "value": '"grpo"'}],
        "bootstrap": [f"/dns4/example.org/tcp/9512/p2p/{PEER}"],
        "access": {"members": [], "secret": b""},
    }
    members = sorted([PEER, OTHER_PEER])

    def signed(
        message: dict[str, Any] | bytes,
        key: Any = KEY,
        domain: bytes = ids.DOMAIN_MANIFEST,
        codec: Any = "raw",
    ) -> bytes:
        payload = message if isinstance(message, bytes) else pack(message)
        return sealed(payload, codec, key=key, domain=domain, swarm=manifest_id(payload))

    def opened(name: str, message: dict[str, Any]) -> Vector:
        return accepted(
            name,
            "manifest",
            signed(message),
            {"swarm": manifest_id(pack(message)), "manifest": message},
        )

    def refused(reason: str, name: str, message: dict[str, Any] | bytes) -> Vector:
        return rejected(reason, name, signed(message), "manifest")

    yield opened("a manifest", good)
    yield opened(
        "the same a millisecond later, another swarm",
        {**good, "created_at": good["created_at"] + 1},
    )
    yield opened("a successor", {**good, "predecessor": manifest_id(pack(good))})
    yield opened("any model", {**good, "models": []})
    yield opened("private", {**good, "access": {"members": members, "secret": b"\x44" * 32}})
    yield opened("a name beyond ASCII", {**good, "name": "Schwärm ≤ 7"})
    room = limits.MANIFEST_BYTES - len(signed(good))
    most = {
        **good,
        "access": {"members": [f"{number:03}" + "a" * 49 for number in range(512)], "secret": b""},
    }
    yield opened("512 members", most)
    yield from refusals(
        "manifest",
        ("oversize", "one byte too long", signed(pack(good) + bytes(room + 1))),
        ("oversize", "70,000 zeros", bytes(70_000)),
        ("malformed", "nothing", b""),
        ("malformed", "last byte missing", signed(good)[:-1]),
        ("signature", "the envelope of a group", sealed(GROUP)),
        ("compression", "said to be compressed", signed(good, codec="zstd")),
        ("signature", "another domain", signed(good, domain=ids.DOMAIN_ROLLOUT)),
        ("signature", "signed by somebody else", signed(good, OTHER_KEY)),
    )
    elsewhere = sign(pack(good), KEY, ids.DOMAIN_MANIFEST, SWARM).signature
    honest = {"key": founder, "payload": pack(good), "signature": elsewhere, "codec": "raw"}
    yield rejected("signature", "signed for another swarm id", pack(honest), "manifest")
    altered = pack({**good, "minimum_version": "0.1.1"})
    taken = sign(pack(good), KEY, ids.DOMAIN_MANIFEST, manifest_id(pack(good))).signature
    yield rejected(
        "signature",
        "one byte altered",
        pack({**honest, "payload": altered, "signature": taken}),
        "manifest",
    )
    identity = b"\x01" + bytes(31)
    anybody = {
        "key": identity,
        "payload": pack({**good, "founder": identity}),
        "signature": FORGED_SIGNATURE,
        "codec": "raw",
    }
    yield rejected("signature", "a founder's key of small order", pack(anybody), "manifest")
    yield refused(
        "schema",
        "60,000 nested arrays in models",
        pack(good).split(pack("models"))[0] + pack("models") + b"\x91" * 60_000,
    )
    yield refused("schema", "60,000 empty maps for tasks", pack({**good, "tasks": [{}] * 60_000}))
    for name, path, value in (
        ("no name", "name", ""),
        ("a name of 65 bytes", "name", "a" * 65),
        ("a name with a line break", "name", "a\nb"),
        ("a version with a space", "minimum_version", "0.1 0"),
        ("no protocols", "protocols", []),
        ("protocols in another order", "protocols", list(reversed(good["protocols"]))),
        ("a protocol twice", "protocols", [good["protocols"][0]] * 2),
        ("17 protocols", "protocols", [f"/{number:02}" for number in range(17)]),
        ("9 models", "models", [model] * 9),
        ("a model without a name", "models.0.name", ""),
        ("no tasks", "tasks", []),
        ("tasks in another order", "tasks", [other_task, task]),
        ("65 tasks", "tasks", [{**task, "id": f"{number:02}"} for number in range(65)]),
        ("1025 bytes of settings", "tasks.0.settings", "a" * 1025),
        ("a group of one", "rollouts.min_completions", 1),
        ("a maximum below the minimum", "rollouts.max_completions", 1),
        ("65 completions", "rollouts.max_completions", 65),
        ("no tokens", "rollouts.max_tokens", 0),
        ("temperature 0", "rollouts.temperature", 0.0),
        ("a rate of 0", "rollouts.groups_per_second", 0.0),
        ("a rate above 1000", "rollouts.groups_per_second", 1000.5),
        ("a setting twice", "settings", good["settings"] * 2),
        ("a setting without a value", "settings.0.value", ""),
        ("17 bootstrap addresses", "bootstrap", good["bootstrap"] * 17),
        ("a bootstrap address with a space", "bootstrap.0", "/ip4/192.0.2.7/tcp/9512 "),
        ("members in another order", "access.members", list(reversed(members))),
        ("513 members", "access.members", [f"{number:03}" for number in range(513)]),
    ):
        yield refused("bounds", name, changed(good, path, value))
    request, response = {"swarm": SWARM}, {"manifest": signed(good), "successor": b""}
    yield accepted("a request", "manifest_request", pack(request), request)
    yield rejected("oversize", "a request of 65 bytes", bytes(65), "manifest_request")
    yield accepted("a response", "manifest_response", pack(response), response)
    unknown = {"manifest": b"", "successor": b""}
    yield accepted("unknown", "manifest_response", pack(unknown), unknown)
    yield from refusals(
        "manifest_response",
        (
            "bounds",
            "a successor to nothing",
            pack({**response, "manifest": b"", "successor": b"\0"}),
        ),
        ("bounds", "a manifest one byte too long", pack({**response, "manifest": bytes(65_537)})),
        ("oversize", "a response one byte too long", bytes(131_137)),
    )

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
    RULES,
    SWARM,
    TASKS,
    Vector,
    accepted,
    changed,
    encoded,
    pack,
    refusals,
    rejected,
    sealed,
)
from swarmnode.wire import ids, limits
from swarmnode.wire.envelope import sign
from swarmnode.wire.manifest import manifest_id

CREATED_AT = 1_790_000_000_000


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
    good: dict[str, Any] = {
        "name": "vectors",
        "founder": founder,
        "created_at": CREATED_AT,
        "predecessor": b"",
        "minimum_version": "0.1.0",
        "protocols": list(ids.PROTOCOLS),
        "models": [model],
        "tasks": [task, other_task],
        "rollouts": RULES,
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

    for name, message in (
        ("a manifest", good),
        ("the same a millisecond later, another swarm", {**good, "created_at": CREATED_AT + 1}),
        ("a successor", {**good, "predecessor": manifest_id(pack(good))}),
        ("any model", {**good, "models": []}),
        ("private", {**good, "access": {"members": members, "secret": b"\x44" * 32}}),
        ("a name beyond ASCII", {**good, "name": "Schwärm ≤ 7"}),
        (
            "512 members",
            changed(good, "access.members", [f"{n:03}" + "a" * 49 for n in range(512)]),
        ),
    ):
        value = {"swarm": manifest_id(pack(message)), "manifest": message}
        yield accepted(name, "manifest", signed(message), value)
    room = limits.MANIFEST_BYTES - len(signed(good))
    elsewhere = sign(pack(good), KEY, ids.DOMAIN_MANIFEST, SWARM).signature
    honest = {"key": founder, "payload": pack(good), "signature": elsewhere, "codec": "raw"}
    taken = sign(pack(good), KEY, ids.DOMAIN_MANIFEST, manifest_id(pack(good))).signature
    altered = {"payload": pack({**good, "minimum_version": "0.1.1"}), "signature": taken}
    identity = b"\x01" + bytes(31)
    anybody = {"key": identity, "payload": pack({**good, "founder": identity})}
    nested = pack(good).split(pack("models"))[0] + pack("models") + b"\x91" * 60_000
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
        ("signature", "signed for another swarm id", honest),
        ("signature", "one byte altered", {**honest, **altered}),
        (
            "signature",
            "a founder's key of small order",
            {**honest, **anybody, "signature": FORGED_SIGNATURE},
        ),
        ("schema", "60,000 nested arrays in models", signed(nested)),
        ("schema", "60,000 empty maps for tasks", signed({**good, "tasks": [{}] * 60_000})),
    )
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
        yield rejected("bounds", name, signed(changed(good, path, value)), "manifest")
    yield encoded("a request", "manifest_request", {"swarm": SWARM})
    yield rejected("oversize", "a request of 65 bytes", bytes(65), "manifest_request")
    response = {"manifest": signed(good), "successor": b""}
    yield encoded("a response", "manifest_response", response)
    yield encoded("unknown", "manifest_response", {"manifest": b"", "successor": b""})
    yield from refusals(
        "manifest_response",
        ("bounds", "a successor to nothing", {"manifest": b"", "successor": b"\0"}),
        ("bounds", "a manifest one byte too long", {**response, "manifest": bytes(65_537)}),
        ("oversize", "a response one byte too long", bytes(131_137)),
    )

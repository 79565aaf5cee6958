"""Vectors of listings and fetches, for `vectors.py`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from protocol.generate.frames import (
    GROUP,
    KEY,
    OTHER_KEY,
    SWARM,
    Vector,
    changed,
    derived,
    encoded,
    plain,
    refusals,
    rejected,
    sealed,
    without,
)
from swarmnode.wire import limits
from swarmnode.wire.envelope import content_id

LIFE = b"\x44" * 8
AUTHOR = KEY.public_key().public_bytes_raw()
LISTED: list[Any] = [
    content_id(sealed(GROUP)),
    AUTHOR,
    "rg/chain_sum",
    1_790_000_000_000,
    len(sealed(GROUP)),
    0.5,
]
REQUEST: dict[str, Any] = {"swarm": SWARM, "life": LIFE, "position": 17, "patience": 10}
LISTING: dict[str, Any] = {"status": "ok", "life": LIFE, "position": 18, "groups": [LISTED]}


def numbered(count: int) -> list[list[Any]]:
    return [[bytes([number]) * 32, *LISTED[1:]] for number in range(count)]


def polls() -> Iterator[Vector]:
    beginning = {**REQUEST, "life": b"", "position": 0}
    for name, request in (
        ("a request", REQUEST),
        ("a request from the beginning", beginning),
        ("the last position", {**REQUEST, "position": 2**63 - 1}),
        ("a request without patience", {**REQUEST, "patience": 0}),
    ):
        yield encoded(name, "listing_request", request)
    yield from refusals(
        "listing_request",
        ("bounds", "a patience of 11 s", {**REQUEST, "patience": limits.PATIENCE_SECONDS + 1}),
        ("bounds", "a position without a life", {**beginning, "position": 1}),
        ("oversize", "a request of 97 bytes", bytes(limits.LISTING_REQUEST_BYTES + 1)),
    )
    longest = [AUTHOR, "a" * 64, 2**63 - 1, limits.GROUP_BYTES, 0.125]
    full = [[content, *longest] for content, *_ in numbered(limits.LISTED)]
    for name, listing in (
        ("a listing", LISTING),
        ("nothing new", {**LISTING, "groups": []}),
        ("14 groups, none of them short", {**LISTING, "groups": full}),
        ("later", {**LISTING, "status": "busy", "groups": []}),
        ("of another swarm", {**LISTING, "status": "unknown", "position": 0, "groups": []}),
        ("no spread", changed(LISTING, "groups.0.5", 0.0)),
    ):
        yield encoded(name, "listing_response", listing)
    for name, place, value in (
        ("no task", 2, ""),
        ("a task with a space", 2, "rg/chain sum"),
        ("65 characters of task", 2, "a" * 65),
        ("a group of no bytes", 4, 0),
        ("a group of more than 1 MiB", 4, limits.GROUP_BYTES + 1),
        ("more spread than rewards have", 5, 0.5625),
        ("less spread than none", 5, -0.125),
    ):
        listing = changed(LISTING, f"groups.0.{place}", value)
        yield rejected("bounds", name, listing, "listing_response")
    yield from refusals(
        "listing_response",
        ("bounds", "15 groups", {**LISTING, "groups": numbered(limits.LISTED + 1)}),
        ("bounds", "a group twice", {**LISTING, "groups": [LISTED] * 2}),
        ("bounds", "groups and no ok", {**LISTING, "status": "busy"}),
        ("schema", "a group with an extra claim", changed(LISTING, "groups.0", [*LISTED, 1])),
        ("schema", "a group with a missing claim", changed(LISTING, "groups.0", LISTED[:-1])),
        ("oversize", "a listing without end", bytes(limits.LISTING_RESPONSE_BYTES + 1)),
    )


def fetches() -> Iterator[Vector]:
    contents = [listed[0] for listed in numbered(16)]
    yield encoded("a fetch", "groups_request", {"contents": contents[:1]})
    yield encoded("a fetch of 16 groups", "groups_request", {"contents": contents})
    yield from refusals(
        "groups_request",
        ("bounds", "a fetch of nothing", {"contents": []}),
        ("bounds", "a fetch of 17 groups", {"contents": [bytes([n]) * 2 for n in range(17)]}),
        ("oversize", "a fetch of a thousand groups", {"contents": [contents[0]] * 1000}),
        ("bounds", "a fetch of one group twice", {"contents": contents[:1] * 2}),
    )
    group = {"status": "ok", "body": sealed(GROUP)}
    absent, later = {"status": "unknown", "body": b""}, {"status": "busy", "body": b""}
    largest = {"status": "ok", "body": bytes(limits.GROUP_BYTES)}
    for name, groups in (
        ("a group, a missing one, and one that did not fit", [group, absent, later]),
        ("as much as fits", [largest, *[absent] * 15]),
    ):
        yield encoded(name, "groups_response", {"groups": groups})
    half = {"status": "ok", "body": bytes(limits.GROUP_BYTES // 2)}
    more = {"status": "ok", "body": bytes(limits.GROUP_BYTES // 2 + 1)}
    yield from refusals(
        "groups_response",
        ("bounds", "more than 1 MiB together", {"groups": [half, more]}),
        ("bounds", "no groups", {"groups": []}),
        ("bounds", "17 answers", {"groups": [absent] * 17}),
        ("bounds", "ok and no group", {"groups": [{**group, "body": b""}]}),
        ("bounds", "a missing group", {"groups": [{**group, "status": "unknown"}]}),
        ("schema", "a group without a status", {"groups": [without(group, "status")]}),
        ("oversize", "groups without end", bytes(limits.GROUPS_RESPONSE_BYTES + 1)),
    )


def derivations() -> Iterator[Vector]:
    """Yield derivations: which groups a listing has, and which listings contradict their groups."""
    one = [[position, "a", "a"] for position in range(3, 103)]  # 1 and 2 were dropped
    last14 = list(range(89, 103))
    own = [[position, "me", "me"] for position in range(93, 103)]
    several = [[position, author, author] for position, author in enumerate("bbbc" + 16 * "a", 1)]
    passed_on = [[1, "a", "a"], [2, "a", "reader"], [3, "reader", "b"], [4, "b", "reader"]]
    beginning = {"life": "", "position": 0}

    def since(position: int, life: bytes = LIFE) -> dict[str, Any]:
        return {"life": life.hex(), "position": position}

    for name, held, request, listed in (
        ("from the beginning", one, beginning, last14),
        ("since a position", one, since(99), [100, 101, 102]),
        ("since a position that was pushed out", one, since(1), last14),
        ("since the last", one, since(102), []),
        ("since a position of another life", one, since(101, b"\x55" * 8), last14),
        ("since a future position", one, since(103), last14),
        ("of ten own groups alone", own, beginning, list(range(93, 103))),
        (
            "of own groups before others",
            [*one[:-10], *own],
            beginning,
            [*range(86, 93), *range(96, 103)],
        ),
        ("of several authors", several, beginning, [1, 2, 3, 4, *range(11, 21)]),
        ("without groups that the reader made or sent", passed_on, beginning, [1]),
    ):
        given = {"life": LIFE.hex(), "last": held[-1][0], "held": held}
        given |= {"own": "me", "reader": "reader", "request": request}
        yield derived(f"a listing {name}", "listing", given, listed)
    frame = sealed(GROUP)
    other = OTHER_KEY.public_key().public_bytes_raw()
    for name, place, value, verdict in (
        ("as it is", 0, LISTED[0], None),
        ("with another content id", 0, b"\x33" * 32, "mismatch"),
        ("with another author", 1, other, "mismatch"),
        ("with another task", 2, "builtin/copy", "mismatch"),
        ("as a younger one", 3, 1_790_000_000_001, "mismatch"),
        ("with another size", 4, len(frame) + 1, "mismatch"),
        ("with another spread, which only a scorer detects", 5, 0.0, None),
    ):
        said = changed({"listed": LISTED}, f"listed.{place}", value)["listed"]
        given = plain({"swarm": SWARM, "listed": said, "frame": frame})
        yield derived(f"a group listed {name}", "listed", given, verdict)

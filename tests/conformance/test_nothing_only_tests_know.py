"""Nothing that only tests know: every action of a state machine is carried out in the product, and
every field of a message or an event is written and read there. `tests.support.product_types` says
how it looks.
"""

from pathlib import Path
from types import NoneType
from typing import get_args, get_type_hints

import msgspec
import pytest

from swarmnode.observe.metrics import METRICS
from swarmnode.observe.snapshot import NodeSnapshot
from tests.support.product_types import Declared, Product, analyse, read_by_script, texts_of

PACKAGE = Path(__file__).parents[2] / "swarmnode"
NO_PRODUCT = ("swarmnode.testing", "swarmnode.demo.liar")
"""Not what an honest node runs: a reader or a writer there is none."""
ON_THE_WIRE = {"forbid_unknown_fields", "tag", "tag_field"}
"""Keywords of a struct that is sent."""

ALLOWED = {
    "swarmnode.crew.record.Record: nobody reads nonce": "makes the hash of the record another one",
    "swarmnode.pipeline.frames.Abort: nobody reads reason": "for whoever looks at the wire",
    "swarmnode.pipeline.frames.Commit: nobody reads norm": "the same",
    **dict.fromkeys(
        (
            "swarmnode.recovery.messages.Edge: nobody reads micro_batch",
            "swarmnode.recovery.messages.Edge: nobody reads step",
        ),
        "names what it is; on the wire",
    ),
    "swarmnode.weights.fingerprint.LoraShape: nobody reads r": (
        "goes into the fingerprint's hash as a whole"
    ),
    "swarmnode.weights.fingerprint.LoraShape: nobody reads alpha": "the same",
    "swarmnode.weights.fingerprint.LoraShape: nobody reads target_modules": "the same",
    "swarmnode.link.messages.Report: nobody reads evidence": "the page reads it from /status",
    "swarmnode.link.messages.WeightsReport: nobody reads exchanges_total": (
        "the demo reads it from /status"
    ),
    "swarmnode.link.messages.WeightsReport: nobody reads solo_steps_total": "the same",
}


def messages_of(product: Product) -> set[str]:
    """What is sent, what is one of several alternatives, and whatever these are made of."""
    found = {item for items in product.unions.values() for item in items}
    found |= {
        name
        for name, declared in product.structs.items()
        if declared.is_struct and declared.keywords & ON_THE_WIRE
    }
    declared = product.structs
    while (
        more := {
            part
            for name in found
            for parts in declared[name].parts.values()
            for part in parts
            if part in declared
        }
        - found
    ):
        found |= more
    return found


def module_of(place: str) -> str:
    return place.rpartition(":")[0]


def findings(product: Product) -> list[str]:
    alternatives = {item for items in product.unions.values() for item in items}
    found = []
    for name in sorted(messages_of(product)):
        declared = product.structs[name]
        if not product.made[name]:
            found.append(f"{name}: nobody makes one")
            continue
        if name in alternatives:
            found += not_carried_out(product, declared)
        for field in declared.fields:
            if field in declared.optional and not product.written[name, field]:
                found.append(f"{name}: nobody writes {field}")
            if not product.read[name, field]:
                found.append(f"{name}: nobody reads {field}")
    return found


def not_carried_out(product: Product, declared: Declared) -> list[str]:
    """An alternative is told from the others somewhere; an action, which is made beside its
    definition, by somebody else."""
    makers = {module_of(place) for place in product.made[declared.name]}
    others = {module_of(place) for place in product.told_apart[declared.name]}
    if makers == {declared.module}:
        others -= makers
    return [] if others else [f"{declared.name}: nobody asks for it"]


def look() -> Product:
    found = analyse(texts_of(PACKAGE), NO_PRODUCT)
    for declared, field, metric in read_by_path():
        found.read[declared, field].append(f"swarmnode.observe.metrics:{metric}")
    read_by_script(
        found,
        f"{NodeSnapshot.__module__}.NodeSnapshot",
        (PACKAGE / "observe" / "page" / "app.js").read_text(),
        "app.js",
    )
    return found


@pytest.fixture(scope="module")
def product():
    return look()


def read_by_path():
    """(class, field, metric) of everything that the table of metrics reads by its path in the
    snapshot."""
    for metric in METRICS:
        sources = (
            [metric.source]
            if isinstance(metric.source, str)
            else []
            if callable(metric.source)
            else metric.source.values()
        )
        for path in sources:
            kind = NodeSnapshot
            for name in path.split("."):
                if not issubclass(kind, msgspec.Struct):
                    break  # a key of a dict
                yield f"{kind.__module__}.{kind.__name__}", name, metric.name
                declared = get_type_hints(kind)[name]
                classes = [
                    each
                    for each in (declared, *get_args(declared))
                    if isinstance(each, type) and each is not NoneType
                ]
                kind = next((each for each in classes if issubclass(each, msgspec.Struct)), dict)


def test_every_action_has_an_executor_and_every_field_a_writer_and_a_reader(product):
    found = {name for name in findings(product) if not name.startswith(NO_PRODUCT)}
    assert sorted(found - ALLOWED.keys()) == []
    assert sorted(ALLOWED.keys() - found) == [], "no longer found: take these out of ALLOWED"


def test_it_looks_at_what_it_is_there_for(product):
    """The analysis itself: what we know to be a message is one, and its readers and writers are
    found."""
    messages = messages_of(product)
    wire, pairing = "swarmnode.wire.messages.", "swarmnode.weights.pairing."
    assert {
        f"{wire}{name}"
        for name in ("Envelope", "Completion", "BulkRequest", "SwarmManifest", "Access")
    } <= messages
    assert {f"{pairing}{name}" for name in ("Due", "Lied", "Send", "Ended")} <= messages
    assert {
        "swarmnode.link.messages.Hello",
        "swarmnode.daemon.watchdog.Restart",
        "swarmnode.rollouts.groups.OwnGroup",
    } <= messages
    assert "swarmnode.rollouts.publisher" in {
        module_of(place) for place in product.written[f"{wire}Announce", "size"]
    }
    assert {module_of(place) for place in product.read[f"{wire}Announce", "size"]} & {
        "swarmnode.rollouts.admission",
        "swarmnode.rollouts.fetching",
    }


# ---- that it can fail ----------------------------------------------------------------------------

MACHINE = """
from __future__ import annotations
import enum
import msgspec

class Due(msgspec.Struct, frozen=True):
    when: float
    why: str = ""

class Lost(msgspec.Struct, frozen=True):
    peer: str

Event = Due | Lost

class Send(msgspec.Struct, frozen=True):
    peer: str

class Open(msgspec.Struct, frozen=True):
    peer: str
    size: int

class Ring(msgspec.Struct, frozen=True):
    times: int

Action = Send | Open | Ring

class Other(msgspec.Struct, frozen=True):
    size: int
    why: str

def advance(state: int, event: Event) -> tuple[Action, ...]:
    if isinstance(event, Due):
        return (Send(event.why), Open("b", 3)) if event.when > 1 else ()
    return (Ring(2),)
"""

DRIVER = """
from made.machine import Action, Due, Lost, Other, Send, advance

class Driver:
    def __init__(self) -> None:
        self.others: list[Other] = []

    def run(self) -> int:
        for event in (Due(1.0), Lost("b")):
            for action in advance(0, event):
                self.perform(action)
        return sum(other.size for other in self.others) + len({other.why for other in self.others})

    def perform(self, action: Action) -> None:
        match action:
            case Send(peer):
                self.others.append(Other(len(peer), why="equal names"))
"""

TESTS = """
from made.machine import Due, Lost, Open, advance

def test_open() -> None:
    (action,) = advance(0, Due(2.0, why="b"))
    assert isinstance(action, Open) and action.size == 3 and action.peer and Lost("c").peer
"""


WAYS = """
import dataclasses
from collections.abc import Iterable
from typing import Any, Protocol
import msgspec

class Sent(msgspec.Struct, forbid_unknown_fields=True):
    by_keyword: int = 0
    by_place: int = 0
    by_replace: int = 0
    by_helper: int = 0
    by_assignment: int = 0
    by_filling: list[int] = msgspec.field(default_factory=list)
    by_nobody: int = 0

class HasKeyword(Protocol):
    by_keyword: int

class Narrow(Protocol):
    by_place: int
    by_nobody_else: int

replace = msgspec.structs.replace

def changed(sent: Sent, **changes: Any) -> Sent:
    return msgspec.structs.replace(sent, **changes)

def write() -> Sent:
    sent = Sent(1, by_place=2)
    sent.by_assignment = 3
    sent.by_filling.append(4)
    return changed(replace(sent, by_replace=5), by_helper=6)

def read(
    protocol: HasKeyword, narrow: Narrow, anything: Any, several: Iterable[Sent | None]
) -> int:
    for one in several:
        if one is not None:
            match one:
                case Sent(by_replace=3):
                    return 1
            return one.by_place + getattr(one, "by_helper")
    return protocol.by_keyword + narrow.by_place + anything.by_assignment
"""


@pytest.fixture(scope="module")
def made_up():
    """`made` has defects, `whole` is the same without them; `ways` are the ways of using a field.
    Analysed together, which is quicker."""
    machine = MACHINE.replace(
        "return (Ring(2),)", "return (Ring(len(event.peer)),) if isinstance(event, Lost) else ()"
    )
    driver = DRIVER.replace("Other, Send", "Open, Other, Ring, Send").replace(
        "Due(1.0)", 'Due(1.0, "b")'
    )
    driver += """
            case Open():
                print(action.peer, action.size)
            case Ring(times=3):
                print("three")
"""
    texts = {
        "made": "",
        "made.machine": MACHINE,
        "made.driver": DRIVER,
        "made.tests": TESTS,
        "ways": WAYS,
    }
    whole = {
        "whole": "",
        "whole.machine": machine,
        "whole.driver": driver.replace("made.", "whole."),
    }
    return analyse(texts | whole, without=("made.tests",))


def test_a_script_reads_what_is_below_its_root():
    source = """
import dataclasses

@dataclasses.dataclass
class Part:
    shown: int
    hidden: int

@dataclasses.dataclass
class Snapshot:
    part: Part | None

@dataclasses.dataclass
class Other:
    shown: int
"""
    product = analyse({"watch": source})
    read_by_script(product, "watch.Snapshot", "row(s.part.shown, hidden)", "script")
    assert {field for field, places in product.read.items() if places} == {
        ("watch.Snapshot", "part"),
        ("watch.Part", "shown"),
    }


def of(package, product):
    return [finding for finding in findings(product) if finding.startswith(f"{package}.")]


def test_what_only_tests_use_is_found(made_up):
    assert of("made", made_up) == [
        "made.machine.Due: nobody writes why",
        "made.machine.Lost: nobody asks for it",
        "made.machine.Lost: nobody reads peer",
        "made.machine.Open: nobody asks for it",
        "made.machine.Open: nobody reads peer",
        "made.machine.Open: nobody reads size",
        "made.machine.Ring: nobody asks for it",
        "made.machine.Ring: nobody reads times",
    ]


def test_all_is_well_once_the_product_uses_it(made_up):
    assert of("whole", made_up) == []


def test_ways_to_write_and_to_read_are_known(made_up):
    """An object of unknown type is read by nobody, nor is what a protocol asks for when the struct
    does not have all of it."""
    assert of("ways", made_up) == [
        "ways.Sent: nobody reads by_assignment",
        "ways.Sent: nobody reads by_filling",
        "ways.Sent: nobody writes by_nobody",
        "ways.Sent: nobody reads by_nobody",
    ]
    assert len(made_up.lost["by_assignment"]) == 1

"""The vectors of protocol/ compared with swarmnode.wire, the independent decoder."""

import dataclasses
import importlib
import json
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import msgspec
import pytest

from protocol.generate import frames
from protocol.generate.schema import MESSAGES as SCHEMA
from swarmnode.config import SharingConfig
from swarmnode.errors import BadMessage
from swarmnode.rollouts.network.admission import Admission, Refusal, _ends_alike
from swarmnode.rollouts.network.puller import EVIDENT, contradiction
from swarmnode.rollouts.network.shelf import Shelf
from swarmnode.stages.crew_messages import (
    OPEN_BYTES,
    CrewRecord,
    StreamOpen,
    crew_id,
    decode_answer,
    decode_request,
)
from swarmnode.stages.network.stream_proxy import STREAM_REFUSALS, StreamPeers, stream_refusal
from swarmnode.stages.stage_frames import FENCE_REASONS, FRAME_REASONS
from swarmnode.tasks.frames import Episode
from swarmnode.tasks.registry import TASKS
from swarmnode.weights.layout import BLOCK
from swarmnode.weights.messages import decode_message, decode_state
from swarmnode.weights.trainer.codecs import int8_from_bytes
from swarmnode.wire import limits, strict
from swarmnode.wire.codec import DECODE_REASONS, decode
from swarmnode.wire.envelope import content_id, open_session, open_summary, peer_id
from swarmnode.wire.ids import DOMAIN_ROLLOUT
from swarmnode.wire.listings import (
    ListedGroup,
    ListingRequest,
)
from swarmnode.wire.manifest import meets_rules, open_manifest
from swarmnode.wire.messages import (
    RolloutRules,
)
from tests.support.authors import episode
from tests.support.stage_reading import read_state, read_whole
from tests.support.unseal import unseal

PROTOCOL = Path(__file__).parents[2] / "protocol"
DOCUMENTS = {
    path.name: json.loads(path.read_text())
    for path in sorted((PROTOCOL / "vectors").glob("*.json"))
}
MESSAGES = {
    name: (SCHEMA[name], getattr(limits, f"{name.upper()}_BYTES"))
    for name in SCHEMA
    if re.match(r"(listing|groups|neighbours|manifest|bulk)_", name)
}
CREWS = {"crews_request": decode_request, "crews_answer": decode_answer}
WEIGHTS = {"weights": decode_message, "weights_state": decode_state}
OPEN_REFUSALS = {reason for reason in STREAM_REFUSALS if reason not in ("malformed", "timeout")}
FRAMES = [
    (name, vector)
    for name, document in DOCUMENTS.items()
    for vector in document["vectors"]
    if "read_as" in vector
]
ADMISSIONS = [
    (document, vector)
    for document in DOCUMENTS.values()
    for vector in document["vectors"]
    if "admit" in vector
]
DERIVATIONS = [
    vector
    for document in DOCUMENTS.values()
    for vector in document["vectors"]
    if "derive" in vector
]


def weights_int8(given: dict) -> list[float] | str:
    try:
        return int8_from_bytes(bytes.fromhex(given["body"]), given["elements"], BLOCK).tolist()
    except BadMessage as bad:
        return bad.reason


def listed_positions(given: dict) -> list[int]:
    """Return the positions that a shelf lists. Groups before those that are held have expired."""
    key = lambda peer: peer.encode().ljust(32)
    now, first = 1e6, given["held"][0][0]
    rows = [[position, "expired", ""] for position in range(1, first)] + given["held"]
    shelf = Shelf(key(given["own"]), b"s" * 32, bytes.fromhex(given["life"]))
    for position, author, source in rows:
        content, made_at = position.to_bytes(32, "big"), 1000 * now * (position >= first)
        listed = ListedGroup(content, key(author), "t", int(made_at), 8, 0.5)
        shelf.put(b"envelope", listed, key(source))
    request = given["request"]
    response = shelf.listing(
        ListingRequest(b"s" * 32, bytes.fromhex(request["life"]), request["position"], 0),
        now,
        key(given["reader"]),
    )
    assert response.position == given["last"]
    return [int.from_bytes(listed.content, "big") for listed in response.groups]


def listed_falsely(given: dict) -> str | None:
    content, author, *rest = given["listed"]
    listed, frame = (
        ListedGroup(bytes.fromhex(content), bytes.fromhex(author), *rest),
        bytes.fromhex(given["frame"]),
    )
    envelope, group = unseal(
        frame, DOMAIN_ROLLOUT, bytes.fromhex(given["swarm"]), limits.GROUP_BYTES
    )
    lie = (
        contradiction(listed, envelope.key, group, len(frame))
        if content_id(frame) == listed.content
        else "content"
    )
    return "mismatch" if lie in EVIDENT else lie


def unplain(record: dict) -> dict:
    """Return a crew record with the hex strings turned back into bytes."""
    fields = ("lineage", "model", "nonce")
    return {name: bytes.fromhex(item) if name in fields else item for name, item in record.items()}


def read_stream_open(frame: bytes, given: dict) -> dict:
    if len(frame) > OPEN_BYTES:
        raise BadMessage("oversize", "to open a stream")
    opened, crew = strict.decode(frame, StreamOpen), given["crew"]
    peers = StreamPeers(bytes.fromhex(crew["crew"]), crew["stage"], tuple(crew["members"]))
    refused = stream_refusal(peers, given["peer"], opened)
    if refused:
        raise BadMessage(refused)
    return msgspec.to_builtins(opened, builtin_types=(bytes,))


STAGES = {
    "stage_frame": read_whole,
    "state_message": read_state,
    "stage_stream_open": read_stream_open,
}
"""Decoded with the vector's context: a crew's shapes or its members."""


def frame_of(vector: dict) -> bytes:
    return joined(vector["frame"])


def joined(parts: list) -> bytes:
    return b"".join(bytes.fromhex(part) * times for part, times in parts)


def judge(
    read_as: str, frame: bytes, domain: bytes, swarm: bytes, given: dict | None = None
) -> dict:
    """Return swarmnode's verdict on a frame, in the form of the vectors."""
    try:
        if read_as in STAGES:
            value = hexed(STAGES[read_as](frame, given))
        elif read_as in MESSAGES:
            value = plain(decode(frame, *MESSAGES[read_as]))
        elif read_as in CREWS:
            value = plain(CREWS[read_as](frame))
        elif read_as in WEIGHTS:
            value = plain(WEIGHTS[read_as](frame))
        elif read_as == "manifest":
            opened = open_manifest(frame)
            value = {"swarm": opened.swarm.hex(), "manifest": plain(opened.manifest)}
        elif read_as == "session":
            peer, session = open_session(frame, swarm)
            value = {"peer": peer, "session": plain(session)}
        elif read_as == "summary":
            peer, summary = open_summary(frame, swarm)
            value = {"peer": peer, "summary": plain(summary)}
        else:
            assert read_as == "group"
            envelope, group = unseal(frame, domain, swarm, limits.GROUP_BYTES)
            value = {
                "peer": peer_id(envelope.key),
                "content": content_id(frame).hex(),
                "codec": envelope.codec,
                "group": plain(group),
            }
    except BadMessage as error:
        return {"verdict": "reject", "reason": error.reason}
    return {"verdict": "accept", "value": value}


def plain(message: msgspec.Struct) -> dict:
    return hexed(msgspec.to_builtins(message, builtin_types=(bytes,)))


def hexed(value):
    if isinstance(value, dict):
        return {name: hexed(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [hexed(item) for item in value]
    return value.hex() if isinstance(value, bytes) else value


@pytest.fixture(scope="module")
def check() -> Iterator[ModuleType]:
    """Import protocol/check.py, which is in no package, with its own folder first on the path."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(PROTOCOL))
        yield importlib.import_module("check")


@pytest.mark.parametrize(
    ("document", "vector"), FRAMES, ids=[f"{name}: {vector['name']}" for name, vector in FRAMES]
)
def test_frame_verdicts_match_the_vectors(document, vector):
    about = DOCUMENTS[document]
    got = judge(
        vector["read_as"],
        frame_of(vector),
        about["domain"].encode(),
        bytes.fromhex(about["swarm"]),
        vector.get("given"),
    )
    assert got == {name: vector[name] for name in ("verdict", "reason", "value") if name in vector}


@pytest.mark.parametrize(
    ("about", "vector"), ADMISSIONS, ids=[vector["name"] for _, vector in ADMISSIONS]
)
def test_admission_matches_the_vectors(about, vector, monkeypatch):
    given = vector["admit"]
    # The current time of the vectors, not today's.
    monkeypatch.setattr("swarmnode.rollouts.network.admission.task_version", given["tasks"].get)
    rules = lambda group: True
    if "rules" in given:
        models = {
            (bytes.fromhex(model), bytes.fromhex(tokenizer)) for model, tokenizer in given["models"]
        }
        rules = lambda group: meets_rules(group, RolloutRules(**given["rules"]), models)
    for task, turns in given.get("turns", {}).items():
        spec = dataclasses.replace(TASKS[task], turns=turns)
        monkeypatch.setattr("swarmnode.rollouts.network.admission.TASKS", {**TASKS, task: spec})
    admission = Admission(
        bytes.fromhex(about["swarm"]),
        given["own"],
        given["tasks"],
        SharingConfig(),
        meets_rules=rules,
    )
    for earlier in given["after"]:
        assert not isinstance(admission.check(joined(earlier), given["now"]), Refusal)
    got = admission.check(frame_of(vector), given["now"])
    outcome = (got.verdict.value, got.reason) if isinstance(got, Refusal) else ("accept", None)
    assert outcome == (vector["verdict"], vector.get("reason"))


DERIVED = {
    "listing": listed_positions,
    "listed": listed_falsely,
    "weights_int8": weights_int8,
    "crew_id": lambda given: crew_id(msgspec.convert(unplain(given["record"]), CrewRecord)).hex(),
}
"""Derivations whose outputs the generator states itself. It computes the others with swarmnode."""


@pytest.mark.parametrize(
    "vector",
    [vector for vector in DERIVATIONS if vector["derive"] in DERIVED],
    ids=lambda vector: vector["name"],
)
def test_derivations_match_the_vectors(vector):
    assert DERIVED[vector["derive"]](vector["input"]) == vector["output"]


@pytest.mark.parametrize("finish", ["eos", "length"])
@pytest.mark.parametrize("done", [True, False])
@pytest.mark.parametrize("taken", [0, 1, 2, 3])
def test_episode_endings_match_the_document(taken, done, finish, check):
    actions = ["left", "up", "right"]
    documented = check.check_rollouts.TEXT.ends_alike(lambda given: (taken, done), actions, finish)
    ours = _ends_alike(episode(actions, finish=finish), Episode(["seen"] * taken, done))
    assert documented == ours


def test_every_reason_and_every_reader_has_a_vector():
    assert {vector.get("reason") for _, vector in FRAMES} == {
        None,
        *DECODE_REASONS,
        "signature",
        *FRAME_REASONS,
        *OPEN_REFUSALS,
    }
    accepted = {vector["read_as"] for _, vector in FRAMES if vector["verdict"] == "accept"}
    refused = {vector["read_as"] for _, vector in FRAMES if vector["verdict"] == "reject"}
    others = {"manifest", "session", "summary"}
    readers = {"group", *MESSAGES, *WEIGHTS, *STAGES, *CREWS, *others}
    assert accepted == refused == readers


def test_vector_names_are_unique():
    for document in DOCUMENTS.values():
        names = [vector["name"] for vector in document["vectors"]]
        assert len(names) == len(set(names))


def test_independent_decoder_agrees_and_exits_0():
    done = subprocess.run(
        [sys.executable, PROTOCOL / "check.py"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (
        done.stdout
        == f"{len(FRAMES) + len(ADMISSIONS) + len(DERIVATIONS)} vectors, 0 judged differently\n"
    )


def test_independent_decoder_exits_1_on_a_wrong_vector(tmp_path):
    for path in (*PROTOCOL.glob("*.py"), *PROTOCOL.glob("*.md"), PROTOCOL / "registry.toml"):
        (tmp_path / path.name).write_text(path.read_text())
    shutil.copytree(PROTOCOL / "schema", tmp_path / "schema")
    (tmp_path / "vectors").mkdir()
    wrong = {
        **DOCUMENTS["neighbours.json"],
        "vectors": [
            {**DOCUMENTS["neighbours.json"]["vectors"][0], "verdict": "reject", "reason": "bounds"}
        ],
    }
    (tmp_path / "vectors" / "wrong.json").write_text(json.dumps(wrong))
    done = subprocess.run(
        [sys.executable, tmp_path / "check.py"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout.splitlines()[-1]) == (1, "1 vectors, 1 judged differently")


def test_independent_decoder_does_not_import_swarmnode():
    source = (
        f"import sys; sys.argv = ['check.py']; sys.path.insert(0, {str(PROTOCOL)!r}); import"
        " runpy\n"
    )
    source += (
        f"try: runpy.run_path({str(PROTOCOL / 'check.py')!r}, run_name='__main__')\nexcept"
        " SystemExit: pass\n"
    )
    source += "names = {name.split('.')[0] for name in sys.modules}\n"
    source += "sys.exit('check_bulk' not in names or bool(names & {'swarmnode', 'msgspec'}))"
    assert (
        subprocess.run(
            [sys.executable, "-I", "-c", source], capture_output=True, check=False
        ).returncode
        == 0
    )


def test_every_reason_of_the_fence_has_a_vector():
    assert {v["output"] for v in DERIVATIONS if v["derive"] == "stage_fence"} == {
        None,
        *FENCE_REASONS,
    }


def mutated(rng: random.Random, data: bytes) -> bytes:
    """Return `data` with one or two other bytes."""
    changed = bytearray(data)
    for _ in range(rng.randint(1, 2)):
        changed[rng.randrange(len(changed))] = rng.choice(
            (0, 1, 0x80, 0xC0, 0xC1, 0xC3, 0xCF, 0xFF, rng.randrange(256))
        )
    return bytes(changed)


def test_decoders_agree_on_mutated_groups(check):
    """Payloads are changed before they are signed, so that mutations pass the signature check."""
    rng, accepted = random.Random(2), 0
    packed = {**frames.COMPLETION, **frames.PACKED}
    groups = [frames.GROUP, frames.changed(frames.GROUP, "completions.0", packed)]
    for _ in range(4000):
        frame = frames.sealed(mutated(rng, frames.pack(rng.choice(groups))))
        ours = judge("group", frame, DOMAIN_ROLLOUT, frames.SWARM)
        theirs = check.judge("group", frame, DOMAIN_ROLLOUT, frames.SWARM)
        assert (ours["verdict"], ours.get("value")) == (theirs["verdict"], theirs.get("value"))
        accepted += ours["verdict"] == "accept"
    assert 100 < accepted < 3900  # mutations are neither all valid nor all invalid


@pytest.mark.parametrize("document", ["stages.json", "crews.json", "state.json"])
def test_decoders_agree_on_mutated_crew_messages(check, document):
    """These messages are not signed, so every change reaches the decoder."""
    rng, accepted = random.Random(3), 0
    seeds = [v for v in DOCUMENTS[document]["vectors"] if v.get("verdict") == "accept"]
    assert len(seeds) > 15
    for _ in range(3000):
        vector = rng.choice(seeds)
        frame = mutated(rng, frame_of(vector))
        about = (vector["read_as"], frame, b"", b"", vector.get("given"))
        ours, theirs = judge(*about), check.judge(*about)
        assert (ours["verdict"], str(ours.get("value"))) == (
            theirs["verdict"],
            str(theirs.get("value")),
        ), frame.hex()
        accepted += ours["verdict"] == "accept"
    assert 100 < accepted < 2900

"""Judge every vector with a second decoder, written from the documents in this folder: `python
protocol/check.py`.

It shares no code with swarmnode: it reads fields and types from schema/ and limits from
registry.toml. It needs only msgpack, cryptography and, for compressed vectors, zstandard. The exit
code is 0 if every vector is judged as recorded, else 1. Each document has its own file
(`check_frames.py` is 00-conventions), which runs the document's Python and checks what the document
states in words. If the two disagree, the document is normative.
"""

import json
import sys
from pathlib import Path

import check_bulk
import check_crews
import check_join
import check_rollouts
import check_stages
import check_state
import check_tasks
import check_weights
from check_frames import REGISTRY, Refused, digest

HERE = Path(__file__).parent
PARTS = (
    check_join,
    check_rollouts,
    check_weights,
    check_stages,
    check_crews,
    check_state,
    check_bulk,
    check_tasks,
)
READERS = {read_as: reader for part in PARTS for read_as, reader in part.READERS.items()}
"""`read_as` of a vector → reader of (frame, domain, swarm id), or of (frame, `given`)."""
DERIVATIONS = {name: derive for part in PARTS for name, derive in part.DERIVATIONS.items()}
DERIVATIONS["content_id"] = lambda envelope: digest(bytes.fromhex(envelope)).hex()


def judge(read_as, frame, domain, swarm, given=None):
    """Return {"verdict": "accept", "value": …} or {"verdict": "reject", "reason": …} of a frame."""
    about = (domain, swarm) if given is None else (given,)
    try:
        return {"verdict": "accept", "value": plain(READERS[read_as](frame, *about))}
    except Refused as refused:
        return {"verdict": "reject", "reason": refused.args[0]}


def joined(parts):
    return b"".join(bytes.fromhex(part) * times for part, times in parts)


def admitted(vector, document):
    given = vector["admit"]
    frames = [joined(parts) for parts in [*given["after"], vector["frame"]]]
    reason = check_rollouts.admit(
        frames, given, document["domain"].encode(), bytes.fromhex(document["swarm"])
    )
    verdicts = [verdict for verdict, reasons in REGISTRY["verdicts"].items() if reason in reasons]
    return [verdicts[0] if verdicts else "accept", reason]


def plain(value):
    """Return `value` for JSON, with bytes in hex."""
    if isinstance(value, dict):
        return {field: plain(item) for field, item in value.items()}
    if isinstance(value, list):
        return [plain(item) for item in value]
    return value.hex() if isinstance(value, bytes) else value


def main():
    count = failures = 0
    for path in sorted((HERE / "vectors").glob("*.json")):
        document = json.loads(path.read_text())
        for vector in document["vectors"]:
            if "derive" in vector:
                wanted, got = vector["output"], DERIVATIONS[vector["derive"]](**vector["input"])
            elif "admit" in vector:
                wanted, got = [vector["verdict"], vector.get("reason")], admitted(vector, document)
            else:
                frame = joined(vector["frame"])
                got = judge(
                    vector["read_as"],
                    frame,
                    document["domain"].encode(),
                    bytes.fromhex(document["swarm"]),
                    vector.get("given"),
                )
                wanted = {field: vector[field] for field in got if field in vector}
            count += 1
            if got != wanted:
                failures += 1
                print(
                    f"{path.name}: {vector['name']}: expected {str(wanted)[:200]}, got"
                    f" {str(got)[:200]}"
                )
    print(f"{count} vectors, {failures} judged differently")
    return 1 if failures or not count else 0


if __name__ == "__main__":
    sys.exit(main())

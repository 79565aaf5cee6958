"""protocol/registry.toml, schema/ and vectors/ are what swarmnode generates, and the documents name
the same verdicts."""

import re
import tomllib
from pathlib import Path

import pytest

from protocol.generate.__main__ import files
from swarmnode.rollouts.reasons import REASONS, Verdict
from swarmnode.wire.codec import DECODE_REASONS

PROTOCOL = Path(__file__).parents[2] / "protocol"
REGISTRY = tomllib.loads((PROTOCOL / "registry.toml").read_text())


def test_generated_files_are_up_to_date():
    generated = files()
    written = {"registry.toml", *(f"schema/{path.name}" for path in PROTOCOL.glob("schema/*"))}
    written |= {f"vectors/{path.name}" for path in PROTOCOL.glob("vectors/*")}
    assert written == generated.keys()
    stale = [name for name in written if (PROTOCOL / name).read_text() != generated[name]]
    assert stale == [], "run `python -m protocol.generate`"


def test_no_domain_string_is_a_prefix_of_another():
    domains = list(REGISTRY["domains"].values())
    assert not [(a, b) for a in domains for b in domains if a != b and b.startswith(a)]


def test_reasons_of_decoding_cost_reputation():
    assert {REASONS[reason] for reason in (*DECODE_REASONS, "signature")} == {Verdict.REJECT}


def test_documents_name_every_registry_entry():
    text = "".join(path.read_text() for path in PROTOCOL.glob("0*.md"))
    names = [*REGISTRY["protocols"].values(), *REGISTRY["domains"].values()]
    names += [f"`{name}`" for verdict in REGISTRY["verdicts"].values() for name in verdict]
    names += [
        f"`{name}`"
        for table in ("security", "private_security", "muxers")
        for name in REGISTRY["transport"][table]
    ]
    assert [name for name in names if name not in text] == []


@pytest.mark.parametrize(
    ("document", "table"), [("02-rollouts.md", "verdicts"), ("04-stages.md", "stage_verdicts")]
)
def test_document_verdicts_match_the_registry(document, table):
    given = re.findall(
        r"\[(REJECT|IGNORE)\] ((?:`\w+`(?:, )?)+)", (PROTOCOL / document).read_text()
    )
    verdicts = {
        (name, verdict.lower()) for verdict, names in given for name in re.findall(r"\w+", names)
    }
    assert verdicts == {
        (name, verdict) for verdict, names in REGISTRY[table].items() for name in names
    }

"""Type the commands of README and docs, except those of "Train alone first". An unused entry of
`World.replacements` or NOT_HERE is an error. One founder runs throughout the test; other nodes end
after one step.
"""

import json
import re

import pytest

from tests.support.netns import Topology, missing
from tests.support.typed_pages import (
    NOT_HERE,
    PARTS,
    ROOT,
    LanMachine,
    World,
    commands,
    follow,
    has_peers,
    shell_lines,
    text_of,
    trains,
)

pytestmark = [pytest.mark.swarm, pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Yield a running founder, started with the commands of the README."""
    world = World(tmp_path_factory.mktemp("docs"))
    try:
        founder = world.machine("founder")
        line = next(line for line in commands("README") if line.startswith("swarmnode init"))
        invite = founder.types(world.here(line)).splitlines()[-1]
        world.invite = invite
        for part in ("README", "join"):
            (printed,) = {
                line.split()[2].strip("'")
                for line in commands(part)
                if line.startswith("swarmnode join")
            }
            world.replacements[printed] = invite
        world.replacements["INVITE"] = invite
        world.done.add(("founder", world.here(line)))
        world.starts("founder", "swarmnode run", stays=True).until(trains)
        yield world
        world.nodes[0].stop()
    finally:
        for node in world.nodes:
            node.kill()


def test_readme(world):
    done = dict(follow(world, "README"))
    member = world.machine("member")
    assert (
        json.loads((member.home / "policy" / "swarmnode.json").read_text())["swarm"]
        == world.invite.rpartition("/")[2]
    )
    assert "FAIL" not in done["swarmnode doctor"]


def test_join(world):
    member = world.machine("member")
    if not member.data.exists():  # when this page runs alone
        member.types("swarmnode key show")
    done = dict(follow(world, "join"))
    new = world.machine("new")
    assert (
        new.types("swarmnode key show").strip()
        in done["swarmnode key import /media/stick/node.key"]
    )


def test_host_a_swarm(world):
    host = world.machine("host")
    world.replacements["<data dir>"] = str(host.data)
    shown = ""
    for line, written in follow(world, "host"):
        if line.startswith("swarmnode key show"):
            world.replacements["<that peer id>"] = written.strip()
        elif line.startswith("swarmnode init"):
            world.replacements["<swarm id>"] = written.strip().rpartition("/")[2]
            shown += written
    (example,) = re.findall(
        r"^```\n\$ swarmnode init --successor[^\n]*\n(.*?)\n```$", text_of("host"), re.S | re.M
    )
    version = lambda text: re.sub(r"version \w{16}", "version", text)
    assert version(example) in version(shown)


@pytest.mark.skipif(bool(missing()), reason=missing() or "-")
def test_two_machines_at_home(world, tmp_path):
    """The machines find each other again when both have other addresses: by mDNS."""
    founds, runs, joins = (
        line.replace("smollm2", "embedded").replace("chat/json_fields", "builtin/sum")
        for line in commands("two machines")
    )
    used_peers = lambda snapshot: trains(snapshot) and snapshot["trainer"]["report"]["peers_used"]
    with Topology() as net:
        desk = LanMachine(tmp_path / "desk", net, "desk", "192.168.7.2")
        attic = LanMachine(tmp_path / "attic", net, "attic", "192.168.7.3")
        nodes = []
        try:
            invite = desk.types(founds).splitlines()[-1]
            nodes = [desk.starts(runs), attic.starts(joins, text=f"{invite}\n")]
            for node, other in zip(nodes, ("attic", "desk"), strict=True):
                node.until(used_peers)
                node.until(
                    lambda snapshot, other=other: (
                        other in [row["name"] for row in snapshot["swarm"]["rows"]]
                    )
                )
            for node in nodes:
                node.stop()
            desk.moves("192.168.7.2", "192.168.7.8")
            attic.moves("192.168.7.3", "192.168.7.9")
            nodes = [machine.starts(runs) for machine in (desk, attic)]
            for node in nodes:
                node.until(has_peers)
            for node in nodes:
                node.stop()
        finally:
            for node in nodes:
                node.kill()


def test_move_a_node(world):
    old, new = world.machine("mover"), world.machine("moved")
    world.starts("mover", "swarmnode run", stays=True).until(trains).stop()
    *leaves, copies, unpacks, checks, runs = commands("move")
    for line in [*leaves, copies.replace("scp ", "cp ").replace("new:", f"{new.home}/")]:
        old.types(line)
    new.types(unpacks)
    assert "FAIL" not in new.types(checks)
    new.env["SWARMNODE_TRAINING_MAX_STEPS"] = "2"
    world.starts("moved", runs).ends()
    (present,) = (
        state["step"]
        for state in json.loads(new.types("swarmnode rollback --json"))["states"]
        if state["present"]
    )
    assert present == 2
    assert new.types("swarmnode key show") == old.types("swarmnode key show")


def test_own_task(world):
    author = world.machine("author")
    rows = [{"prompt": f"What is {i} + 2?", "answer": str(i + 2)} for i in range(40)]
    (author.home / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = dict(follow(world, "own task"))
    tried = [written for line, written in done.items() if line.startswith("swarmnode task try")]
    assert len(tried) == 2
    assert all("10 questions" in written and "0 failed" in written for written in tried), tried


def test_operations(world):
    node = world.starts("operator", "swarmnode run", stays=True).until(trains)
    done = dict(follow(world, "operations"))
    node.stop()
    assert {"swarmnode pause", "swarmnode resume"} <= set(done)
    home = world.machine("operator").home
    assert (home / "policy" / "swarmnode.json").exists()


def test_engines(world):
    done = dict(follow(world, "engines"))
    (printed,) = [text for line, text in done.items() if line.startswith("swarmnode vllm-command")]
    assert "--enable-lora --max-lora-rank 16" in printed


def test_stages(world):
    dict(follow(world, "stages"))
    assert (world.machine("stager").home / "policy" / "swarmnode.json").exists()


def test_types_every_section_of_a_page():
    for page in {page for page, _ in PARTS.values()}:
        parts = [commands(part) for part, (of_page, _) in PARTS.items() if of_page == page]
        assert sorted(line for part in parts for line in part) == sorted(
            shell_lines((ROOT / page).read_text())
        )


def test_no_entry_is_unused(tmp_path):
    lines = [line for part in PARTS for line in commands(part)]
    assert all(any(re.match(pattern, line) for line in lines) for pattern in NOT_HERE)
    pages = "\n".join(map(text_of, PARTS))
    assert all(text in pages for text in World(tmp_path).replacements)

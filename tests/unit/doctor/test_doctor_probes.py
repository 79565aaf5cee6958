"""Facts from real directories, sockets, keys and peers, and the whole command."""

import json
import os
import socket
from dataclasses import replace

import pytest
import trio

from protocol.generate.frames import PEER
from swarmnode import cli, settings
from swarmnode.config import HttpConfig, NetworkConfig, PolicyConfig
from swarmnode.doctor import checks, probes
from swarmnode.doctor import command as doctor_command
from swarmnode.doctor.checks import DeviceFacts, DialBackFacts, PeerFacts
from swarmnode.files import lock_data_dir
from swarmnode.observe.history import History
from swarmnode.observe.http import status_json
from swarmnode.p2p.identity import load_or_create
from swarmnode.policy.examine import examine
from tests.support import snapshots
from tests.support.answering import serving, whole
from tests.support.hosts import host

CPU = DeviceFacts(
    torch="2.13.0", placement="cpu, float32", parameters=1, need_bytes=1, free_bytes=2**30
)


def test_running_node_is_found_and_keeps_its_lock(tmp_path):
    held = lock_data_dir(tmp_path)
    assert probes.directory(tmp_path).running_pid == os.getpid()
    os.close(held)
    assert probes.directory(tmp_path).running_pid is None
    os.close(lock_data_dir(tmp_path))


def test_key_states_are_recognised(tmp_path):
    path = tmp_path / "identity.key"
    assert probes.key(path).state == "absent"
    load_or_create(path)
    assert (probes.key(path).state, probes.key(path).mode) == ("good", 0o600)
    path.chmod(0o644)
    assert probes.key(path).mode == 0o644
    path.write_bytes(path.read_bytes()[:60])
    assert probes.key(path).state == "unusable"
    path.write_bytes(b"ssh-ed25519 AAAA")
    assert probes.key(path).state == "unusable"
    path.write_bytes(b"-----BEGIN ENCRYPTED PRIVATE KEY-----")
    found = checks.check_key(replace(probes.key(path), mode=0o600))
    assert "has a passphrase" in found.text
    assert "openssl pkey -in" in found.remedy


def test_doctor_of_a_founder_does_not_dial_itself(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(probes, "device", lambda policy, trial: DeviceFacts(error="left out"))
    dialled = []

    def dial(trial):
        dialled.append(trial)
        return [
            PeerFacts(address, "unreachable") for address in trial.network.initial_peers
        ], DialBackFacts()

    monkeypatch.setattr(probes, "peers", dial)
    me = load_or_create(tmp_path / "identity.key").peer_id
    other = f"/ip4/192.0.2.1/tcp/1/p2p/{PEER}"
    for peers, bootstrap in (
        ([f"/ip4/127.0.0.1/tcp/1/p2p/{me}"], "ok"),
        ([f"/ip4/127.0.0.1/tcp/1/p2p/{me}", other], "fail"),
        ([], "warn"),
    ):
        said = [f"node.data_dir={tmp_path}", f"network.initial_peers={json.dumps(peers)}"]
        doctor_command.doctor(lambda said=said: settings.load(overrides=said), as_json=True)
        found = json.loads(capsys.readouterr().out)["checks"]
        levels = [check["level"] for check in found if check["name"] == "bootstrap"]
        assert levels == ([bootstrap] if bootstrap else [])
    assert [trial.network.initial_peers for trial in dialled] == [[], [other], []]


def test_used_port_is_own_only_while_the_node_runs(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        listen = [("127.0.0.1", port)]
        (stranger, http), (own, _) = (
            probes.ports(listen, HttpConfig(port=0), running) for running in (False, True)
        )
    assert (stranger.problem, stranger.is_own) == (probes.IN_USE, False)
    assert own.is_own
    assert (http.key, http.problem) == ("http.port", "")
    metrics = probes.ports([], HttpConfig(port=0, metrics=f"127.0.0.1:{port}"), running=False)[-1]
    assert (metrics.key, metrics.port) == ("http.metrics", port)
    assert probes.ports(listen, HttpConfig(port=0), running=False)[0].problem == ""


def test_examines_the_port_of_the_first_start(tmp_path):
    (tmp_path / "port").write_text("4711\n")
    assert probes.listen_addresses(NetworkConfig().listen_addrs, tmp_path) == [("127.0.0.1", 4711)]


def test_running_node_is_queried_over_http(tmp_path):
    seen = snapshots.example()
    with serving(whole(status_json(seen, History()))) as url:
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "addresses.json").write_text(json.dumps({"http": url}))
        status = probes.status(tmp_path)
    assert probes.clock(status).offset == seen.swarm.clock_offset_seconds
    nat = seen.network.nat
    relays = len(nat.client.relays)
    assert probes.dialled_back(status) == DialBackFacts(nat.reach.verdict, "", relays)


def test_tries_only_known_free_ports(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        addresses = [f"/ip4/127.0.0.1/tcp/{taken.getsockname()[1]}", "/ip6/::1/tcp/0"]
        assert probes.free_ports(probes.listen_addresses(addresses, tmp_path)) == []
    assert probes.free_ports(probes.listen_addresses(addresses, tmp_path)) == addresses[:1]


def test_finds_gpus_on_the_bus_and_the_driver_version(tmp_path):
    for name, kind, vendor in (
        ("0", "0x030200", "0x10de"),
        ("1", "0x020000", "0x10de"),
        ("2", "0x030000", "0x1002"),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "class").write_text(kind + "\n")
        (tmp_path / name / "vendor").write_text(vendor + "\n")
    assert probes.gpus(tmp_path) == ["amd", "nvidia"]
    assert probes.gpus(tmp_path / "none") == []
    version = tmp_path / "version"
    for text, driver in (
        ("NVIDIA UNIX Open Kernel Module for x86_64  570.124.06  Release Build", "570.124.06"),
        ("NVIDIA UNIX x86_64 Kernel Module  535.161.07  Sat Feb 17", "535.161.07"),
    ):
        version.write_text(f"NVRM version: {text}\n")
        assert probes.nvidia_driver(version) == driver
    assert probes.nvidia_driver(tmp_path / "absent") == ""


def test_the_policy_is_examined_without_its_weights():
    found = examine(PolicyConfig(devices="cpu"))
    assert DeviceFacts(**found).parameters > 100_000
    assert "error" not in found
    missing = examine(PolicyConfig(model="/no/such/model", devices="cpu"))
    assert (missing["error_code"], missing["on_cpu"]) == (69, True)
    assert "no such directory" in missing["error"]
    assert examine(PolicyConfig(devices="cuda:7"))["error_code"] == 69


async def test_distinguishes_outcomes_of_bootstrap_peers(tmp_path):
    """Each bootstrap address has its own verdict: one answers, one has another key, one is no peer,
    and one does not exist."""
    async with host(tmp_path / "peer") as peer:
        good = peer.listen_addrs[0]
        other = load_or_create(tmp_path / "other.key").peer_id
        listener = await trio.open_tcp_listeners(0, host="127.0.0.1")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.serve_listeners, hang_up, listener)
            silent = f"/ip4/127.0.0.1/tcp/{listener[0].socket.getsockname()[1]}/p2p/{other}"
            with socket.socket() as unused:
                unused.bind(("127.0.0.1", 0))
                absent = f"/ip4/127.0.0.1/tcp/{unused.getsockname()[1]}/p2p/{other}"
                wrong = good.rpartition("/")[0] + "/" + other
                network = NetworkConfig(initial_peers=[good, wrong, silent, absent])
                trial = probes.Trial(network, bytes(32), None, None, [])
                facts, dial_back = await trio.to_thread.run_sync(probes.peers, trial)
            nursery.cancel_scope.cancel()
    assert [fact.outcome for fact in facts] == ["ok", "wrong_peer", "no_handshake", "unreachable"]
    assert [fact.address for fact in facts] == [good, wrong, silent, absent]
    # the port is only chosen at the first start: there is nothing to dial back yet
    assert dial_back == DialBackFacts("unknown")


async def hang_up(stream):
    await stream.aclose()


@pytest.fixture
def on_cpu(monkeypatch):
    monkeypatch.setattr(probes, "device", lambda cfg, trial: CPU)
    monkeypatch.setattr(probes, "kernel_synchronised", lambda: True)


def doctor(*arguments):
    return cli.run(["doctor", *map(str, arguments)])


def test_fresh_machine_passes_and_is_not_changed(tmp_path, on_cpu, capsys):
    assert doctor("--data-dir", tmp_path / "new", "--set", "http.port=0", "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["exit_code"] == 0
    names = {check["name"] for check in result["checks"]}
    assert {"configuration", "data directory", "disk", "key", "port", "http port"} <= names
    assert {"clock", "bootstrap", "device", "model"} <= names
    assert not (tmp_path / "new").exists()


def test_invalid_configuration_is_the_only_check(tmp_path, capsys):
    assert doctor("--data-dir", tmp_path, "--set", "http.prot=1") == 78
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("FAIL  configuration: command line: unknown key http.prot")
    assert len(printed) == 2


NVIDIA_SMI = """#!/bin/sh
case "$1" in
--query-gpu*)
    echo "0, GPU-a, NVIDIA H100, 79000, 81559"
    echo "1, GPU-b, NVIDIA H100, 500, 81559" ;;
*) echo "GPU-b, 4711, 80000" ;;
esac
"""


def test_driver_lists_cards_and_their_processes(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert probes.driver_cards() == [], "no driver"
    program = tmp_path / "nvidia-smi"
    program.write_text(NVIDIA_SMI)
    program.chmod(0o755)
    assert probes.driver_cards() == [
        "card 0 NVIDIA H100, 79000 of 81559 MiB free",
        "card 1 NVIDIA H100, 500 of 81559 MiB free, process 4711 holds 80000 MiB",
    ]
    assert cli.run(["plan", "embedded"]) == 0
    result = capsys.readouterr().out
    assert "GPUs of this machine:\n  card 0 NVIDIA H100, 79000 of 81559 MiB free\n" in result
    assert "each GPU holds a copy" in result
    program.write_text("#!/bin/sh\nexit 9\n")
    assert probes.driver_cards() == []


def test_doctor_names_ranks_and_cards():
    found = examine(PolicyConfig(devices=2))
    assert found["cards"] == ["2 ranks: cpu, cpu"]
    assert examine(PolicyConfig(devices="cpu"))["cards"] == []
    result = checks.check_device(
        DeviceFacts(torch="2", placement="cuda:0, bfloat16: configured", cards=["cuda:0 Big"])
    )
    assert result.text.endswith("configured; cuda:0 Big")

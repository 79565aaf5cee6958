"""Verdicts from facts: level, exit code and remedy."""

import dataclasses

import pytest

from swarmnode.config import PolicyConfig, TrainingConfig
from swarmnode.doctor import checks
from swarmnode.doctor.checks import (
    Check,
    ClockFacts,
    ConfigFacts,
    DeviceFacts,
    DialBackFacts,
    DirectoryFacts,
    KeyFacts,
    PeerFacts,
    PortFacts,
    ReachFacts,
    RouterFacts,
)
from swarmnode.policy.convert import cached_copy

GIB = 2**30
DIRECTORY = DirectoryFacts("/data", free_bytes=50 * GIB)
GPU = DeviceFacts(
    torch="2.13.0",
    built_for="CUDA 12.8",
    placement="cuda:0, bfloat16: compute capability 9.0",
    on_cpu=False,
    hardware=["nvidia"],
    driver="570.1",
    parameters=10**9,
    need_bytes=18 * GIB,
    free_bytes=80 * GIB,
)
CPU = DeviceFacts(
    torch="2.13.0+cpu",
    placement="cpu, float32: no accelerator found",
    parameters=10**5,
    need_bytes=2**21,
    free_bytes=8 * GIB,
)


def but(facts, **changes):
    return dataclasses.replace(facts, **changes)


def directory(**changes):
    return checks.check_directory(but(DIRECTORY, **changes))


def disk(**changes):
    return checks.check_disk(but(DIRECTORY, **changes))


def key(*facts, **more):
    return checks.check_key(KeyFacts("/k", *facts, **more))


def port(*facts):
    return checks.check_port(PortFacts(*facts))


def on_cpu(**changes):
    return checks.check_device(but(CPU, **changes))


def clock(**facts):
    return checks.check_clock(ClockFacts(**facts))


LISTEN = "network.listen_addrs"
FOREIGN = port(LISTEN, "192.0.2.1", 4001, "not an address of this machine")


def reach(*hosts, own=("127.0.0.1", "192.168.1.7"), announced=(), wants=True):
    return checks.check_reachability(ReachFacts(hosts, announced, own, wants))


@pytest.mark.parametrize(
    ("check", "level", "code", "text"),
    [
        (directory(problem="Permission denied"), "fail", 69, "Permission denied"),
        (directory(running_pid=12), "ok", 0, "pid 12"),
        (disk(), "ok", 0, "50.0 GiB"),
        (disk(free_bytes=10 * 2**20), "fail", 69, "10 MiB"),
        (disk(state_bytes=30 * GIB), "warn", 0, "before the old one"),
        (key("good"), "ok", 0, "only its owner"),
        (key("good", 0o640), "fail", 77, "0640"),
        (key("unreadable", detail="Permission denied"), "fail", 69, "cannot be read"),
        (port("http.port", "127.0.0.1", 9464), "ok", 0, "free"),
        (port("http.port", "127.0.0.1", 9464, checks.IN_USE), "warn", 0, "another process"),
        (port(LISTEN, "0.0.0.0", 9512, checks.IN_USE), "fail", 69, "another process"),
        (FOREIGN, "fail", 69, "192.0.2.1 port 4001: not an address of this machine"),
        (reach("127.0.0.1"), "warn", 0, "outbound only"),
        (reach("0.0.0.0"), "warn", 0, "behind NAT"),
        (reach("0.0.0.0", announced=["/dns4/me.example/tcp/4001"]), "ok", 0, "me.example"),
        (clock(synchronised=False), "warn", 0, "not synchronised"),
        (clock(synchronised=True, offset=86_400.0), "fail", 69, "86400 s behind the clocks of"),
        (clock(synchronised=True, offset=-29.0), "ok", 0, "sync"),
        (on_cpu(), "ok", 0, "no accelerator"),
        (on_cpu(hardware=["nvidia"]), "fail", 69, "driver is not loaded"),
        (
            on_cpu(hardware=["nvidia"], driver="470.1", built_for="CUDA 12.8", gpu_error="too old"),
            "fail",
            69,
            "driver 470.1: too old",
        ),
        (on_cpu(hardware=["nvidia"], configured="cpu"), "ok", 0, "cpu"),
        (on_cpu(hardware=["amd"]), "warn", 0, "not built for ROCm"),
        (on_cpu(placement="", error="'cuda:3' is not here", error_code=69), "fail", 69, "cuda:3"),
        (checks.check_model(but(GPU, error="needs 900 GiB", error_code=75)), "fail", 75, "900 GiB"),
        (checks.check_model(but(CPU, parameters=10**9)), "warn", 0, "on the CPU"),
        (checks.check_files(20_000, 200), "ok", 0, "20000"),
        (checks.check_files(256, 200), "warn", 0, "256"),
        (checks.check_config(ConfigFacts("cannot honour", 77)), "fail", 77, "cannot honour"),
    ],
)
def test_judges_each_fact(check, level, code, text):
    assert (check.level, check.exit_code) == (level, code)
    assert text in check.text
    assert bool(check.remedy) == (level != "ok")
    assert check != FOREIGN or "set network.announce_addrs to this address" in check.remedy
    assert "\n" not in check.text + check.remedy


def bootstrap(*outcomes):
    return checks.check_peers(
        [PeerFacts(f"/ip4/1.2.3.{i}/tcp/4001", outcome) for i, outcome in enumerate(outcomes)]
    )


@pytest.mark.parametrize(
    ("outcomes", "levels", "code"),
    [
        ((), ["warn"], 0),
        (("ok",), ["ok"], 0),
        (("ok", "unreachable", "wrong_peer"), ["ok", "warn", "warn"], 0),
        (("unreachable", "no_handshake"), ["fail", "fail"], 69),
        (("unreachable", "wrong_peer"), ["fail", "fail"], 77),
        (("not_tried",), ["warn"], 0),
    ],
)
def test_one_bootstrap_peer_that_answers_is_enough(outcomes, levels, code):
    found = bootstrap(*outcomes)
    assert [check.level for check in found] == levels
    assert checks.exit_code(found) == code


def test_a_founder_needs_no_bootstrap_peer():
    (check,) = checks.check_peers([], is_bootstrap=True)
    assert (check.level, check.remedy) == ("ok", "")
    alone = checks.check_peers([PeerFacts("/ip4/1.2.3.4/tcp/1", "unreachable")], is_bootstrap=True)
    assert [check.level for check in alone] == ["fail"]


def test_exit_code_is_the_most_severe():
    failed = [Check("a", "fail", "", exit_code=code) for code in (75, 69, 77)]
    assert checks.exit_code(failed) == 77
    assert checks.exit_code([*failed, Check("b", "fail", "", exit_code=78)]) == 78
    assert checks.exit_code([Check("c", "warn", "")]) == 0


@pytest.mark.parametrize(
    ("dial_back", "router", "level", "text"),
    [
        (DialBackFacts("public", "8.8.8.8"), None, "ok", "peers reach this node at 8.8.8.8"),
        (DialBackFacts("public", "192.168.1.7"), None, "ok", "peers in the local network reach"),
        (DialBackFacts("private", "203.0.113.7", 1), None, "ok", "1 relay serves it"),
        (DialBackFacts("private", "203.0.113.7", 2), None, "ok", "2 relays serve it"),
        (DialBackFacts("private"), None, "warn", "no peer relays for it; behind NAT"),
        (DialBackFacts("private"), RouterFacts("public", "8.8.8.8"), "warn", "address 8.8.8.8"),
        (DialBackFacts(), None, "warn", "behind NAT"),
        (DialBackFacts(), RouterFacts("carrier", "100.64.0.9"), "warn", "carrier-grade NAT"),
        (DialBackFacts(), RouterFacts("private", "192.168.0.2"), "warn", "double NAT"),
        (DialBackFacts(), RouterFacts("public", "8.8.8.8"), "ok", "8.8.8.8"),
    ],
)
def test_reachability_is_one_verdict(dial_back, router, level, text):
    facts = ReachFacts(["0.0.0.0"], [], ["127.0.0.1", "192.168.1.7"], True)
    check = checks.check_reachability(facts, dial_back, router)
    assert check.level == level
    assert text in check.text


def server_check(rank=16, **facts):
    result = {"model": "Qwen/Qwen3-4B", "version": "0.32.0", "lora_rank": 16, "context": 4096}
    policy = PolicyConfig(model="Qwen/Qwen3-4B", lora={"r": rank})
    found = checks.ServerFacts("http://127.0.0.1:8000", **{**result, **facts})
    return checks.check_server(found, policy, TrainingConfig(max_completion_length=1024))


def test_a_server_of_the_converted_directory_is_suitable():
    judged = lambda model: checks.check_server(
        checks.ServerFacts("http://127.0.0.1:8000", model=model),
        PolicyConfig(model="smollm2"),
        TrainingConfig(),
    )
    assert judged(str(cached_copy("smollm2"))).level == "ok"
    assert "it serves /cache/other, not smollm2" in judged("/cache/other").text


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"logprobs": "processed_logprobs"}, ""),
        ({"error": "http://127.0.0.1:8000: Connection refused"}, "samples with its own engine"),
        ({"model": "meta/Llama"}, "serves meta/Llama, not Qwen"),
        ({"lora_rank": 0}, "accepts no adapters"),
        ({"lora_rank": 8}, "adapters up to rank 8"),
        ({"logprobs": "raw_logprobs"}, "raw_logprobs"),
        ({"context": 1024}, "context of 1024"),
    ],
)
def test_unsuitable_server_is_a_warning_with_the_remedy(facts, words):
    found = server_check(**facts)
    assert (found.level, found.exit_code) == ("warn" if words else "ok", 0)
    assert (words or "vLLM 0.32.0") in found.text
    assert ("vllm-command" in found.remedy) == bool(words)

"""The engine that samples with a server: against a stand-in by default, and against vLLM with
`pytest -m engine`."""

import socket
import threading
from dataclasses import dataclass, replace
from importlib import resources

import pytest
import torch
from structlog.testing import capture_logs

from swarmnode.config import LoraSettings, PolicyConfig, ServerSettings
from swarmnode.doctor import probes
from swarmnode.gguf import SMOLLM2
from swarmnode.policy.convert import local_copy
from swarmnode.policy.engine import served as served_module
from swarmnode.policy.engine import vllm as vllm_module
from swarmnode.policy.engine.client import JsonClient, ServerFailed
from swarmnode.policy.engine.protocol import Request
from swarmnode.policy.engine.selector import select_engine
from swarmnode.policy.engine.served import RETRY_SECONDS, Served, ServerFirst, TextCheck
from swarmnode.policy.engine.served_weights import ServedWeights
from swarmnode.policy.engine.vllm import VllmServer
from swarmnode.policy.generate import Sampling, generate
from swarmnode.policy.load import Policy, load_policy
from swarmnode.policy.micro import MicroBatcher
from tests.support.gaps import gaps
from tests.support.served import real, standin
from tests.support.served.standin import ANSWER_FAULTS, StandIn
from tests.support.served.untied import untie
from tests.support.waiting import wait_for

torch.set_num_threads(1)
pytestmark = pytest.mark.timeout(900)
PROMPTS = ["What is 3 + 4?", "Calculate 10 + 8.", "12"]
BOUND = 1e-4
"""Difference in nats between a server's log-probabilities and those of training, in float32."""
ENGINE = pytest.param("vLLM", marks=pytest.mark.engine)
PLACES = ["stand-in", ENGINE]


class Clock:
    """A clock that advances by `step` seconds per reading."""

    now, step = 0.0, 0.0

    def __call__(self):
        self.now += self.step
        return self.now


@dataclass
class Place:
    """A server that samples from the base of the policies."""

    url: str
    policies: dict[int, Policy]
    """The policy by the rank of its adapter; 0 has none."""
    stand_in: StandIn | None = None


def load(directory):
    return {
        rank: load_policy(
            PolicyConfig(model=str(directory), devices="cpu", lora=LoraSettings(r=rank))
        )
        for rank in (0, 4)
    }


@pytest.fixture(scope="module")
def loaded():
    return load(resources.files("swarmnode.policy") / "embedded")


@pytest.fixture(scope="module")
def vllm(tmp_path_factory):
    """Yield a real server of SmolLM2, and its directory."""
    if not real.python():
        pytest.skip(f"{real.VARIABLE} names no Python with vLLM: tests/support/served/install.sh")
    directory = untie(local_copy(SMOLLM2), tmp_path_factory.mktemp("smollm2"))
    with real.running(str(directory), tmp_path_factory.mktemp("vllm") / "log.txt") as url:
        yield Place(url, load(directory)), directory


@pytest.fixture(params=PLACES)
def place(request, loaded):
    if request.param == "vLLM":
        place, directory = request.getfixturevalue("vllm")
        base = {"method": "reload_weights", "kwargs": {"weights_path": str(directory)}}
        JsonClient(place.url).order("/collective_rpc", base, 60)
        yield place
        return
    with StandIn(loaded[4].clone()) as server:
        yield Place(server.url, loaded, server)


@pytest.fixture
def stand_in(loaded):
    with StandIn(loaded[4].clone()) as server:
        yield server


def connected(url, policy, directory):
    server = VllmServer(url, policy.lora_rank > 0)
    return server, ServedWeights(server, policy, directory, lambda: None)


def engine_of(url, policy, directory, sampling, clock=None):
    server, weights = connected(url, policy, directory)
    return Served(server, weights, policy, sampling, lambda: None, clock or Clock())


def submitted(engine, prompts=PROMPTS):
    for number, prompt in enumerate(prompts):
        engine.submit(Request(number, prompt))
    return engine


def drained(engine, version=0):
    found = {}
    wait_for(
        lambda: (
            found.update({one.number: one.sample for one in engine.finished(version)})
            or not engine.statistics().unfinished
        )
    )
    return [found[number] for number in sorted(found)]


def move(policy, by=0.02):
    """An update, to weights that the server does not have."""
    with torch.no_grad():
        for parameter in policy.trainable_parameters():
            parameter.add_(by * torch.randn_like(parameter))


# ---- what both do --------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_recorded_log_probabilities_are_those_that_training_computes(place, tmp_path, temperature):
    policy = place.policies[0].clone()
    engine = engine_of(place.url, policy, tmp_path, Sampling(4, 24, temperature))
    samples = drained(submitted(engine), version=7)
    assert [sample.prompt_ids for sample in samples] == [policy.encode_prompt(p) for p in PROMPTS]
    assert gaps(policy, samples, temperature).max() < BOUND
    for completion in (c for sample in samples for c in sample.completions):
        assert completion.versions == [7] * len(completion.ids)
        assert (completion.ids[-1] in policy.eos_ids) == (completion.finish == "eos")
        assert completion.finish == "eos" or len(completion.ids) == 24
        assert completion.text == policy.decode(completion.ids)
    engine.close()


@pytest.mark.parametrize("rank", [0, 4])
def test_the_server_follows_every_update(place, tmp_path, rank):
    policy = place.policies[rank].clone()
    engine = engine_of(place.url, policy, tmp_path, Sampling(4, 24))
    for version in range(3):
        samples = drained(submitted(engine), version)
        assert gaps(policy, samples).max() < BOUND
        assert {v for s in samples for c in s.completions for v in c.versions} == {version}
        with engine.pause():
            move(policy)
    written = sorted(path.name for path in tmp_path.iterdir())
    assert len(written) == 2, "older weights are removed"
    engine.close()


@pytest.mark.parametrize("rank", [0, 4])
def test_request_continues_across_an_update(place, tmp_path, rank):
    policy = place.policies[rank].clone()
    policy = replace(policy, unused_ids=policy.eos_ids)  # no completion ends early
    engine = engine_of(place.url, policy, tmp_path, Sampling(8, 200, 2.0))
    if place.stand_in is not None:
        place.stand_in.hold_at = 3
    for attempt in range(
        1, 12
    ):  # a real server may not have started the request, or may have finished it
        submitted(engine, PROMPTS[:1])
        if not all(engine.finished(attempt) == [] for _ in range(attempt)):
            continue
        with engine.pause():
            move(policy)
        version = attempt + 1
        (sample,) = drained(engine, version)
        versions = [c.versions for c in sample.completions]
        assert all(each == sorted(each) for each in versions)
        if any(len(set(each)) == 2 and each[-1] == version for each in versions):
            break
    else:
        pytest.fail("no completion was under way when the weights changed")
    assert engine.statistics().oldest is None
    engine.close()


def test_an_id_without_a_token_is_never_sampled(place, tmp_path):
    policy = replace(place.policies[0].clone(), unused_ids=frozenset(range(20, 100)))
    engine = engine_of(place.url, policy, tmp_path, Sampling(8, 24, 2.0))
    samples = drained(submitted(engine))
    assert gaps(policy, samples, 2.0).max() < BOUND
    engine.close()


def test_an_evaluation_of_64_prompts_is_sampled(place, tmp_path):
    """Together they exceed the 2,048 tokens that vLLM prefills at a time by default."""
    policy = place.policies[0].clone()
    prompts = [f"What is {number} + {number}? " * 6 for number in range(64)]
    engine = engine_of(place.url, policy, tmp_path, Sampling(1, 8))
    samples = drained(submitted(engine, prompts), None)
    assert sum(len(sample.prompt_ids) for sample in samples) > 2048
    assert len(samples) == len(prompts)
    engine.close()


def test_server_with_another_base_is_not_used(place, tmp_path):
    other = place.policies[0].clone()
    move(other, 0.05)
    connected(place.url, other, tmp_path / "other")
    with pytest.raises(ServerFailed, match="other weights"):
        connected(place.url, place.policies[4].clone(), tmp_path)


def test_the_doctor_reads_what_a_server_says_of_itself(place):
    facts = probes.server(ServerSettings(url=place.url), True)
    assert (facts.error, facts.dtype) == ("", "float32")
    assert facts.version == "0.32.0"
    assert 256 <= facts.context <= place.policies[0].context
    assert facts.lora_rank >= 8
    assert facts.logprobs == "processed_logprobs"


# ---- faults of a server --------------------------------------------------------------------------


@pytest.fixture
def first(stand_in, loaded, tmp_path):
    """Yield (engine with the own engine as its fallback, its policy, clock, the stand-in)."""
    return server_first(stand_in, loaded[4].clone(), tmp_path)


def server_first(stand_in, policy, directory):
    sampling = Sampling(2, 8)
    clock, server = Clock(), VllmServer(stand_in.url, policy.lora_rank > 0)
    engine = ServerFirst(
        server,
        lambda: ServedWeights(server, policy, directory, lambda: None),
        lambda weights, how: Served(server, weights, policy, how, lambda: None, clock),
        sampling,
        lambda: select_engine(
            policy, MicroBatcher(4096), ["lockstep"], sampling, policy.random_generator(0)
        ),
        clock,
    )
    return engine, policy, clock, stand_in


def took_over(said):
    """Return the matching log lines."""
    return [each for each in said if each["event"].startswith("the server does not sample")]


@pytest.mark.parametrize("fault", ANSWER_FAULTS)
def test_invalid_answers_are_not_trained_on(first, fault):
    engine, policy, clock, stand_in = first
    stand_in.fault = fault
    with capture_logs() as said:
        samples = drained(submitted(engine))
    (line,) = took_over(said)
    assert ANSWER_FAULTS[fault] in line["detail"]
    assert "\n" not in line["detail"]
    assert (line["resubmitted"], line["retry_seconds"]) == (3, RETRY_SECONDS)
    assert gaps(policy, samples).max() < BOUND, "the own engine has answered"
    assert engine.kind() == "lockstep"
    assert engine.server().state == "away"
    assert engine.server().failures == {line["reason"]: 1}

    stand_in.fault = ""
    drained(submitted(engine))
    assert engine.kind() == "lockstep", "it is not tried at once"
    clock.now += RETRY_SECONDS
    drained(submitted(engine))
    assert engine.kind() == "served"
    assert (engine.server().state, engine.server().version) == ("sampling", "0.32.0")


@pytest.mark.parametrize(("share", "caught"), [(0.0, False), (0.1, True)])
def test_a_mark_in_every_tenth_answer_is_detected(loaded, share, caught):
    policy, sampling = loaded[4].clone(), Sampling(8, 16)
    check, rng = TextCheck(policy, 1.0), policy.random_generator(1)
    mark = policy.encode_prompt("7")[-1:] * 8

    def serve():
        for step in range(48):
            samples = generate(policy, PROMPTS, sampling, rng)
            for group in samples:
                for number, completion in enumerate(group.completions):
                    if (step + number) % 10 < 10 * share:
                        completion.ids[-1:] = mark
                check(group)

    if caught:
        with pytest.raises(ServerFailed, match="would not have sampled"):
            serve()
    else:
        serve()


@pytest.mark.parametrize("fault", ["ignores_weights", "ignores_adapter", "other_model"])
@pytest.mark.parametrize("by", [0.02, 0.0005])
def test_stale_server_is_detected_at_the_next_load(first, fault, by):
    engine, policy, _, stand_in = first
    with torch.no_grad():  # as after some training: B is not 0
        for parameter in policy.trainable_parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    drained(submitted(engine))
    assert engine.kind() == "served"
    stand_in.fault = fault
    with engine.pause():
        move(policy, by)
    with capture_logs() as said:
        samples = drained(submitted(engine))
    (line,) = took_over(said)
    assert line["reason"] == "canary"
    assert gaps(policy, samples).max() < BOUND


def test_missing_adapter_is_detected_early(first):
    """From the very first updates, which move the policy by less than the bound on the mean
    difference."""
    engine, policy, _, stand_in = first
    drained(submitted(engine))
    stand_in.fault = "ignores_adapter"
    with engine.pause():
        move(policy, 0.00005)
    with capture_logs() as said:
        drained(submitted(engine))
    assert [line["reason"] for line in took_over(said)] == ["canary"]
    assert "former weights" in took_over(said)[0]["detail"]


def test_restarted_server_is_used_again_later(first):
    engine, policy, clock, stand_in = first
    drained(submitted(engine))
    stand_in.restart()
    with capture_logs() as said:
        drained(submitted(engine))
    assert [line["reason"] for line in took_over(said)] == ["version"]
    assert "'default'" in took_over(said)[0]["detail"]
    clock.now += RETRY_SECONDS
    assert gaps(policy, drained(submitted(engine))).max() < BOUND
    assert engine.kind() == "served"


def test_lost_server_costs_no_group(first):
    engine, _, _, stand_in = first
    drained(submitted(engine))
    stand_in.hold_at = 1
    submitted(engine)
    wait_for(lambda: len(stand_in.bodies) == 6)
    stand_in.stop()
    samples = drained(engine)
    assert len(samples) == 3
    assert engine.kind() == "lockstep"
    assert set(engine.server().failures) == {"unreachable"}


def test_wait_for_a_silent_server_is_bounded(first):
    engine, _, clock, stand_in = first
    drained(submitted(engine))
    stand_in.fault = "slow"
    submitted(engine)
    clock.now += 10 * served_module.SILENCE_SECONDS
    assert engine.finished(0) == []
    assert "/health" not in stand_in.asked, "a long step is no silence of the server's"
    clock.step = served_module.HEALTH_SECONDS + 1
    assert engine.finished(0) == []
    assert stand_in.asked.count("/health") == 1, "a health check is sent"
    clock.step = served_module.SILENCE_SECONDS
    with capture_logs() as said:
        assert len(drained(engine)) == 3
    assert [line["reason"] for line in took_over(said)] == ["timeout"]
    assert "no completion in 301 seconds" in took_over(said)[0]["detail"]


def test_retries_of_an_absent_server_back_off(loaded, tmp_path, monkeypatch):
    monkeypatch.setattr(vllm_module, "ABOUT_SECONDS", 0.1)
    with standin.raw_server() as url:
        stand_in = StandIn(loaded[0].clone())
        stand_in.url = url
        engine, _, clock, _ = server_first(stand_in, loaded[0].clone(), tmp_path)
        waits = []
        for _ in range(7):
            with capture_logs() as said:
                drained(submitted(engine))
            (line,) = took_over(said)
            waits.append(line["retry_seconds"])
            clock.now += waits[-1]
    assert waits == [30, 60, 120, 240, 480, 600, 600]
    assert "in 0 s" in line["detail"]


def test_unfinished_requests_move_to_the_server(first):
    engine, _, clock, stand_in = first
    stand_in.fault = "error_500"
    submitted(engine)
    wait_for(lambda: engine.finished(0) == [] and engine.kind() == "lockstep")
    stand_in.fault = ""
    clock.now += RETRY_SECONDS
    engine.submit(Request(9, "Calculate 1 + 1."))
    assert engine.kind() == "served"
    assert len(drained(engine)) == 4


def test_a_question_that_was_cancelled_is_not_answered(first):
    engine, *_ = first
    submitted(engine)
    engine.cancel(1)
    assert len(drained(engine)) == 2


def test_an_answer_of_another_trainers_version_is_refused(first, loaded, tmp_path):
    engine, _, _, stand_in = first
    drained(submitted(engine))
    connected(stand_in.url, loaded[4].clone(), tmp_path / "rival")
    with capture_logs() as said:
        drained(submitted(engine))
    assert [line["reason"] for line in took_over(said)] == ["version"]


# ---- the client ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("address", "is_allowed"), [("93.184.216.34", False), ("10.1.2.3", True), ("fd00::1", True)]
)
def test_host_name_is_checked_by_its_addresses(monkeypatch, address, is_allowed):
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 80))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    dialled = []

    def connect(to, timeout):
        dialled.append(to[0])
        raise ConnectionRefusedError(111, "Connection refused")

    monkeypatch.setattr(socket, "create_connection", connect)
    with pytest.raises(ServerFailed, match="refused" if is_allowed else "public address"):
        JsonClient("http://gpu.example:80").order("/health", None, 1)
    assert dialled == ([address] if is_allowed else [])


def drops():
    """The server sends a byte at long intervals and never completes the response."""
    yield b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n"
    while True:
        threading.Event().wait(0.02)
        yield b" "


@pytest.mark.parametrize(
    ("chunks", "reason", "words"),
    [
        (drops(), "timeout", "no complete response"),
        ([b"HTTP/1.1 200 OK\r\nX: ", b"a" * 2**20], "unreachable", "too long"),
        ([b"nonsense\r\n\r\n"], "unreachable", "illegal"),
        ([b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n[[[[[[[[["], "answer", "invalid response"),
        ([b"HTTP/1.1 200 OK\r\n\r\n" + b"[" * 2**20], "answer", "invalid response"),
        ([b"HTTP/1.1 200 OK\r\n\r\n", b" " * 2**20, b"  "], "answer", "exceeds"),
    ],
)
def test_an_answer_is_bounded_in_time_and_bytes(chunks, reason, words):
    with standin.raw_server(chunks) as url, pytest.raises(ServerFailed, match=words) as raised:
        JsonClient(url).call("/v1/models", answer=list[int], seconds=0.5)
    assert raised.value.reason == reason


@pytest.mark.parametrize(
    ("url", "wrong"),
    [
        ("http://8.8.8.8:8000", "public address"),
        ("http://[::ffff:8.8.8.8]:8000", "public address"),
        ("http://127.0.0.1:8000/v1", "not of the form"),
        ("http://me:secret@127.0.0.1:8000", "not of the form"),
    ],
)
def test_a_url_that_is_public_or_none_is_refused(url, wrong):
    with pytest.raises(ValueError, match=wrong):
        ServerSettings(url=url)
    for taken in ("http://127.0.0.1:8000", "http://192.168.1.7:8000", "https://gpu-box:8000"):
        assert ServerSettings(url=taken).url == taken

"""Environments by URL: a real server process with OpenEnv's protocol, and faults of a server."""

import contextlib
import functools
import ipaddress
import re
import socket
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from swarmnode.config import Config, DatasetConfig
from swarmnode.errors import ConfigError
from swarmnode.swarm import manifest, manifest_store, requirements
from swarmnode.tasks import openenv, registry
from swarmnode.tasks.client import AsyncScorer, Scored, Scorer
from swarmnode.tasks.environments import Environments
from swarmnode.tasks.frames import Question
from swarmnode.tasks.seeds import environment_seed, evaluation_seed
from swarmnode.wire.messages import TaskEntry
from tests.support import registered
from tests.support.fakes.scorer import score_one
from tests.support.manifests import founded
from tests.support.waiting import free_port, wait_for

NAME = "env/sums"
SEED = 4 << 20


def certificate_for(address):
    """A certificate that its own key signed, and that key, as PEM."""
    now, key = datetime.now(UTC), ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test")])
    signed = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(address))]),
            critical=False,
        )
        .sign(key, hashes.SHA256())
    )
    return signed.public_bytes(Encoding.PEM), key.private_bytes(
        Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()
    )


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """File of the server's certificate, whose issuer this machine does not trust."""
    directory = tmp_path_factory.mktemp("tls")
    shown, key = certificate_for("127.0.0.1")
    (directory / "cert.pem").write_bytes(shown)
    (directory / "key.pem").write_bytes(key)
    return directory / "cert.pem"


def connect(port):
    socket.create_connection(("127.0.0.1", port), 1).close()


@pytest.fixture(scope="module")
def servers(certificate):
    """The URLs of a server process, without TLS and with it."""
    ports = [free_port(), free_port()]
    told = [*map(str, ports), str(certificate), str(certificate.with_name("key.pem"))]
    process = subprocess.Popen([sys.executable, "-m", "tests.support.openenv_server", *told])
    try:
        wait_for(lambda: [*map(connect, ports)])
        yield f"ws://127.0.0.1:{ports[0]}", f"https://127.0.0.1:{ports[1]}"
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def server(servers):
    return servers[0]


pytestmark = pytest.mark.usefixtures("tasks_as_before")


def installed(tmp_path, url, name=NAME, **settings):
    config = DatasetConfig(**{"source": url, "prompt": "text", "answer": "message", **settings})
    registry.install_datasets({name: config}, tmp_path / "datasets")
    return registry.TASKS[name]


@pytest.fixture
def turned(tmp_path, server, monkeypatch):
    """The task of /sums, whose server was replaced after the installation."""
    content = installed(tmp_path, f"{server}/sums").environment.content

    def turn(url):
        with monkeypatch.context() as kept:
            kept.setattr(openenv, "Session", lambda url: contextlib.nullcontext())
            kept.setattr(openenv, "hash_questions", lambda *asked: content)
            installed(tmp_path, url)

    return turn


ref = functools.partial(registered.ref, NAME)


def right_of(prompt):
    return str(int(prompt.split()[2]) + 1)


def test_server_gives_question_and_rewards(tmp_path, server):
    installed(tmp_path, f"{server}/sums", template="{prompt} Say it.", extract="tag")
    told = []
    with Scorer(alive=lambda: told.append(1)) as scorer:
        prompt = scorer.score(ref(), []).prompt
        assert prompt.startswith("What is ")
        assert prompt.endswith(" plus 1? Say it.")
        right = right_of(prompt)
        texts = [f"<answer>{each}</answer>" for each in (right, "no", "raise")]
        scored = scorer.score(ref(), [f"I think {texts[0]}", *texts[1:], "x" * 10**6])
        assert (scored.prompt, scored.rewards, scored.errors) == (prompt, [1.0, 0.0, 0.0, 0.0], 1)
        assert "step was refused: cannot do that" in scored.error
        assert scorer.statistics().reward_errors == {NAME: 1}
        mixed = scorer.score_many([(ref(), []), (registered.ref(), ["x"]), (ref(), [])])
        assert [each.prompt == prompt for each in mixed] == [True, False, True]
    assert len(told) > 10, "the trainer's watchdog hears of every answer"


def test_server_episode_is_replayed_from_its_start(tmp_path, server):
    installed(tmp_path, f"{server}/guess", turns=12, template="{prompt} Guess.")
    with Scorer() as scorer:
        prompt = scorer.score(ref(), []).prompt
        assert prompt.endswith(" plus 1? Guess.")
        right = right_of(prompt)
        count = [str(number) for number in range(1, int(right) + 1)]
        scored = scorer.score(
            ref(), [count, [right, "1"], [], ["99"], ["99", "raise"], ["x" * 5000], ["99"] * 14]
        )
        assert scored.rewards == [1.0, 1.0] + [0.0] * 5
        assert scored.episodes[0].observations == ["higher"] * (int(right) - 1) + ["right"]
        done = [True, True, False, False, True, True, True]
        assert [each.done for each in scored.episodes] == done
        assert [len(scored.episodes[at].observations) for at in (1, 6)] == [1, 12]
        assert (scored.errors, "step was refused: cannot do that" in scored.error) == (1, True)


def test_lost_server_costs_the_questions_of_a_call(tmp_path, server):
    installed(tmp_path, f"{server}/guess", turns=4)
    with Scorer() as scorer:
        results = scorer.score_many([(ref(), [["5"]]), (ref(), [["leave"]]), (ref(), [["5"]])])
        assert isinstance(results[0], Scored)
        assert ["closed the connection" in str(each) for each in results[1:]] == [True, True]
        assert isinstance(scorer.score_many([(ref(), [["5"]])])[0], Scored)


async def test_network_process_scores_with_the_server(tmp_path, server):
    installed(tmp_path, f"{server}/sums")
    async with AsyncScorer() as scorer:
        prompt = (await score_one(scorer, ref(index=3))).prompt
        scored, other = await scorer.score_many(
            [(ref(index=3), [right_of(prompt), "0"]), (registered.ref(), ["x"])]
        )
        assert (scored.prompt, scored.rewards) == (prompt, [1.0, 0.0])
        assert isinstance(other, Scored)


def test_environment_seeds_separate_held_out_questions():
    trained = {environment_seed(SEED, index) for index in range(1000)}
    held_out = {environment_seed(evaluation_seed(NAME), index) for index in range(1000)}
    assert max(trained | held_out) < 2**32
    assert len(trained) == len(held_out) == 1000
    assert not trained & held_out


@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        ("nonsense", "not an answer of OpenEnv"),
        ("huge", "an answer of more than 1 MiB"),
        ("silent", "no answer within 0.3 s"),
        ("drop", r"it closed the connection \(1011 crashed\)"),
        ("moved", "does not speak OpenEnv's WebSocket: HTTP 307"),
        ("nowhere/at/all", "does not speak OpenEnv's WebSocket: HTTP 403"),
        ("other", "asks other questions than before"),
        ("moody", "the same seed gave two questions"),
    ],
)
def test_misbehaving_server_is_one_line(turned, server, kind, problem):
    turned(f"{server}/{kind}")
    # the others are to answer, on a busy machine too
    environments = Environments(seconds=0.3 if kind == "silent" else 10.0)
    began = time.monotonic()
    results = environments.judge([Question(NAME, SEED, index, ["1", "2"]) for index in range(20)])
    assert time.monotonic() - began < 5, "one that fails is not waited for again in the same call"
    assert len(results) == 20
    for result in results:
        assert (result.prompt, result.rewards) == ("", [0.0, 0.0])
        assert "\n" not in result.error
    assert re.search(problem, results[0].error), results[0].error


@pytest.mark.parametrize(
    ("kind", "problem"), [("odd", "a reward of 7, not in 0 to 1"), ("none", "gave no reward")]
)
def test_a_reward_that_is_none_is_0_and_counted(turned, server, kind, problem):
    turned(f"{server}/{kind}")
    with Scorer() as scorer:
        scored = scorer.score(ref(), ["1", "2"])
        assert (scored.rewards, scored.errors) == ([0.0, 0.0], 2)
        assert problem in scored.error


def test_unreachable_server_costs_only_its_questions(turned, server):
    turned("ws://127.0.0.1:1")
    with Scorer() as scorer:
        gone, other = scorer.score_many([(ref(), ["1"]), (registered.ref(), ["x"])])
        assert "Connection refused" in str(gone)
        assert isinstance(other, Scored)
        turned(f"{server}/sums")
        assert scorer.score(ref(), []).prompt, "it is back"


def test_a_node_starts_while_its_server_does_not_run(tmp_path, server, monkeypatch):
    version = (installed(tmp_path, f"{server}/sums"), registry.task_version(NAME))[1]
    monkeypatch.setattr(socket, "create_connection", lambda *args: pytest.fail("asked again"))
    installed(tmp_path, f"{server}/sums")
    assert registry.task_version(NAME) == version


def test_servers_with_equal_questions_are_one_task(tmp_path, server):
    def version_of(url, **settings):
        installed(tmp_path, f"{server}/{url}", **settings)
        return registry.task_version(NAME)

    same = version_of("sums")
    assert version_of("odd") == same
    others = version_of("sums", template="{prompt}!"), version_of("sums", extract="tag")
    assert len({same, version_of("other"), *others}) == 4


@pytest.mark.parametrize(
    ("name", "source", "settings", "problem"),
    [
        (NAME, "/moody", {}, "the same seed gave two questions: reset must draw everything"),
        (NAME, "/sums", {"prompt": "prompt"}, "observation has no field 'prompt', only text, turn"),
        (NAME, "/sums", {"verifier": "numeric", "held_out": 0.2}, "held_out, verifier: not a"),
        (NAME, "ws://127.0.0.1:1", {}, "Connection refused"),
        (NAME, "ws://me:password@127.0.0.1:1", {}, "is not the URL of a server"),
        ("data/sums", "/sums", {}, "and no other task, is named env/<name>"),
    ],
)
def test_environment_errors_are_one_line_before_the_start(
    tmp_path, server, name, source, settings, problem
):
    url = f"{server}{source}" if source.startswith("/") else source
    with pytest.raises(ConfigError, match=problem) as raised:
        installed(tmp_path, url, name=name, **settings)
    assert "\n" not in str(raised.value)
    assert name in str(raised.value)
    assert not list(tmp_path.glob("datasets/*"))


def test_tls_server_needs_a_trusted_certificate(tmp_path, servers, certificate, monkeypatch):
    told = r"its certificate: self.signed certificate; .* in the file that SSL_CERT_FILE names"
    with pytest.raises(ConfigError, match=told):
        installed(tmp_path, f"{servers[1]}/sums")
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    installed(tmp_path, f"{servers[1]}/sums")
    with Scorer() as scorer:
        right = right_of(scorer.score(ref(), []).prompt)
        assert scorer.score(ref(), [right, "no"]).rewards == [1.0, 0.0]


@pytest.mark.parametrize(
    ("named", "problem"),
    [
        ("https://localhost:{tls}", "certificate is not valid for 'localhost'.*; name the server"),
        ("http://127.0.0.1:{tls}", "closed|reset|HTTP"),
        ("wss://127.0.0.1:{plain}", "for a server without TLS use http:// or ws://"),
    ],
)
def test_tls_errors_are_one_line(tmp_path, servers, certificate, monkeypatch, named, problem):
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    plain, tls = (url.rpartition(":")[2] for url in servers)
    with pytest.raises(ConfigError, match=problem) as raised:
        installed(tmp_path, f"{named.format(plain=plain, tls=tls)}/sums")
    assert "\n" not in str(raised.value)


def test_only_a_private_swarm_may_have_one(tmp_path, server):
    installed(tmp_path, f"{server}/sums")
    config = Config.model_validate({"task": {"names": [NAME]}, "node": {"data_dir": tmp_path}})
    with pytest.raises(ConfigError, match="unless the swarm is founded with --private or --member"):
        founded(config=config)
    with pytest.raises(ConfigError, match=r"unless the swarm is private \(init --private\)"):
        manifest_store.apply_stored(config)
    alone = Config.model_validate({**config.model_dump(), "sharing": {"enabled": False}})
    assert manifest_store.apply_stored(alone)[0] == alone
    private = founded(config=config, secret=bytes(32))
    (tmp_path / manifest.SECRET_FILE).write_text("00" * 32)
    (tmp_path / manifest.SECRET_FILE).chmod(0o600)
    assert requirements.can_honour(private.manifest, config) == []
    forged = founded(tasks=private.manifest.tasks)
    (problem,) = requirements.can_honour(forged.manifest, config)
    assert f"{NAME} is an environment by URL, which only a private swarm may have" in problem


def test_member_without_the_server_gets_an_error(tmp_path, server):
    installed(tmp_path, f"{server}/sums")
    entry = TaskEntry(NAME, registry.task_version(NAME), manifest.settings_text(NAME))
    assert server not in entry.settings, "where it runs is nobody's business"
    assert requirements.task_problems(entry) == []
    installed(tmp_path, f"{server}/other")
    assert "an environment with other content" in requirements.task_problems(entry)[0]
    (problem,) = requirements.task_problems(TaskEntry("env/absent", entry.version, entry.settings))
    assert "that this node does not have: run it and set its URL in task.datasets" in problem

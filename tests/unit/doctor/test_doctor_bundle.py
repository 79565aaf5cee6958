"""The bundle for bug reports contains logs and settings, and none of the node's secrets."""

import base64
import json
import tarfile

import pytest
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from swarmnode import cli
from swarmnode.doctor import bundle, probes
from swarmnode.doctor.checks import DeviceFacts, DialBackFacts
from swarmnode.p2p.identity import load_or_create

CPU = DeviceFacts(
    torch="2.13.0", placement="cpu, float32", parameters=1, need_bytes=1, free_bytes=2**30
)
SECRET = bytes(range(100, 132))
INVITE = (
    "/ip4/192.0.2.1/tcp/9512/p2p/12D3KooWK99VoVxNE7XzyBwXEzW7xhK7Gpv85r9F3V3fyKSUKPH5/swarm/"
    + "ab" * 32
)
PASSPHRASE, TOKEN, PASSWORD = 'correct horse "battery"', "hf_" + "Zz9" * 11, "hunter2hunter2"


@pytest.fixture
def node(tmp_path, monkeypatch):
    """Return a data directory with secrets, all of which are quoted in its log."""
    directory = tmp_path / "node"
    (directory / "log").mkdir(parents=True)
    identity = load_or_create(directory / "identity.key")
    raw = identity.private_key.private_bytes(Encoding.Raw, PrivateFormat.Raw, NoEncryption())
    (directory / "swarm.secret").write_text(SECRET.hex() + "\n")
    (directory / "config.toml").write_text(
        f'[swarm]\ninvite = "{INVITE}"\n[node]\nname = "kitchen"\n'
    )
    monkeypatch.setenv("KEY_PASSPHRASE_FOR_A_TEST", PASSPHRASE)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "0123456789abcdef")
    secrets = [
        SECRET.hex(),
        base64.b64encode(SECRET).decode(),
        raw.hex(),
        base64.b64encode(raw).decode(),
        PASSPHRASE,
        json.dumps(PASSPHRASE)[1:-1],
        TOKEN,
        PASSWORD,
        INVITE,
        "0123456789abcdef",
        *(directory / "identity.key").read_text().splitlines()[1:-1],
    ]
    lines = [
        {"event": f"logged {each}", "error": {"what": [each]}, "password": PASSWORD}
        for each in secrets
        if each != PASSWORD
    ]
    lines.append(
        {
            "event": f"proxy http://me:{PASSWORD}@proxy.example:3128/x failed",
            "peer": identity.peer_id,
        }
    )
    text = "\n".join(map(json.dumps, lines)) + f"\nnot JSON: {SECRET.hex()} {TOKEN}\n"
    (directory / "log" / "network.jsonl").write_text(text)
    monkeypatch.setattr(probes, "device", lambda config, trial: CPU)
    monkeypatch.setattr(probes, "peers", lambda trial: ([], DialBackFacts()))
    monkeypatch.chdir(tmp_path)
    return directory, secrets, identity.peer_id


def unpacked(directory):
    """Return file name → text of the only bundle in a directory."""
    (file,) = directory.glob("swarmnode-bundle-*.tar.gz")
    assert file.stat().st_mode & 0o777 == 0o600
    with tarfile.open(file) as archive:
        return {
            entry.name.partition("/")[2]: archive.extractfile(entry).read().decode()
            for entry in archive
        }


def test_bundle_contains_logs_and_no_secrets(node, tmp_path, capsys):
    directory, secrets, peer = node
    monkey = cli.run(
        [
            "doctor",
            "--bundle",
            "-d",
            str(directory),
            "--set",
            "http.port=0",
            "--json",
            "--set",
            "swarm.name=evening",
        ]
    )
    printed = capsys.readouterr().out
    result = json.loads(printed)
    assert result["exit_code"] == monkey
    files = unpacked(tmp_path)
    assert set(files) == {"versions.json", "doctor.json", "config.json", "log/network.jsonl"}
    for name, text in files.items():
        for secret in secrets:
            assert secret not in text, (name, secret)
    assert "evening" in files["config.json"]
    assert "kitchen" in files["config.json"]
    assert json.loads(files["versions.json"])["packages"]["libp2p"]
    assert "HF_TOKEN" in files["versions.json"], "that it is set helps, what it is does not"
    assert {check["name"] for check in json.loads(files["doctor.json"])} >= {
        "configuration",
        "data directory",
        "model",
    }
    assert peer in files["log/network.jsonl"]
    assert files["log/network.jsonl"].count("\n") == len(secrets) - 1 + 1


def test_bundle_is_written_for_an_invalid_configuration(node, tmp_path, capsys):
    directory, _, _ = node
    assert cli.run(["doctor", "--bundle", "-d", str(directory), "--set", "http.prot=0"]) == 78
    assert "unknown key http.prot" in unpacked(tmp_path)["doctor.json"]
    assert "wrote " in capsys.readouterr().out


def test_bundle_with_a_secret_is_not_written(node, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bundle.Redaction, "text", lambda self, text: text)
    assert cli.run(["doctor", "--bundle", "-d", str(node[0]), "--set", "http.port=0"]) == 77
    assert (
        "log/network.jsonl would contain a secret: nothing was written" in capsys.readouterr().err
    )
    assert not list(tmp_path.glob("swarmnode-bundle-*"))

"""README.md, join.md, host-a-swarm.md and own-task.md, followed to the letter: their commands are taken out of the text and typed.

Every command of every page has to be one that the program has, with options that it has. Those of the four pages that can be run on one
machine without a network are run, by people who have a home directory each; what has to be another on
this machine is named beside it.
"""

import contextlib
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import tomllib
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from swarmnode.cli import app

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "docker").glob("*.md")])
READY_SECONDS = 240.0
PEER = "12D3KooWK99VoVxNE7XzyBwXEzW7xhK7Gpv85r9F3V3fyKSUKPH5"
PLACEHOLDERS = {"<that peer id>": PEER, "<swarm id>": "ab" * 32, "<data dir>": "/srv/node"}


def commands(page: Path) -> list[str]:
    """What the page has people type into a shell, without the comments behind it."""
    text = page.read_text()
    fenced = "\n".join(re.findall(r"^```(?:sh|bash|console)?\n(.*?)^```", text, re.S | re.M))
    indented = "\n".join(line[4:] for line in text.splitlines() if re.match(r" {4}\S", line))
    lines = [line.removeprefix("$ ") for line in [*fenced.splitlines(), *indented.splitlines()]]
    return [re.split(r"\s{2,}#|\s#\s", line)[0].strip() for line in lines if re.match(r"(swarmnode|pip|make) ", line)]


def typed(page: str) -> list[str]:
    return commands(ROOT / page)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_of_a_page_is_one_that_there_is(page):
    for line in commands(page):
        words = shlex.split(re.sub("|".join(PLACEHOLDERS), lambda found: PLACEHOLDERS[found[0]], line))
        if words[0] == "swarmnode":
            app.parse_args([word for word in words[1:] if word != "…"], exit_on_error=False, print_error=False)
        elif words[0] == "pip":
            named = [re.search(r"\[([\w,]+)\]", word) for word in words]
            known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
            assert all(extra in known for found in named if found is not None for extra in found[1].split(",")), line
        else:
            assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.M), line


class Person:
    """Somebody with a home directory, who types into a shell there."""

    def __init__(self, home: Path, **environment: str) -> None:
        self.home = home
        home.mkdir()
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("SWARMNODE_", "XDG_"))}
        settings = {
            "NETWORK_MDNS": "false", "HTTP_PORT": "0", "POLICY_THREADS": "1", "TRAINING_STEP_INTERVAL": "2", "WEIGHTS_JOIN_SECONDS": "1",
            "TRAINING_EVAL_EVERY": "1000",
        }  # fmt: skip
        self._env = {
            **kept, "HOME": str(home), "HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), str(home / "wordtasks")]),
            **{f"SWARMNODE_{name}": value for name, value in settings.items()}, **environment,
        }  # fmt: skip
        self._running: subprocess.Popen[bytes] | None = None

    def _words(self, line: str) -> list[str]:
        program, *words = shlex.split(line)
        assert program == "swarmnode"
        return [sys.executable, "-m", "swarmnode", *words]

    def types(self, line: str, code: int = 0) -> str:
        """Runs a command to its end; its standard output."""
        done = subprocess.run(self._words(line), cwd=self.home, env=self._env, capture_output=True, text=True, timeout=READY_SECONDS)
        assert done.returncode == code, f"{line}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    @contextlib.contextmanager
    def runs(self, line: str, ready: bool = True):
        """Starts a command that goes on; yields what its node says of itself once it is ready, and stops it with Ctrl-C afterwards."""
        with open(self.home / "out", "ab") as out:
            process = subprocess.Popen(self._words(line), cwd=self.home, env=self._env, stdout=out, stderr=out, start_new_session=True)
        try:
            yield self._wait(process, line, ready)
            os.killpg(process.pid, signal.SIGINT)
            assert process.wait(READY_SECONDS) == 0, self.said()
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def _wait(self, process, line, ready):
        late = time.monotonic() + READY_SECONDS
        while time.monotonic() < late:
            assert process.poll() is None, f"{line}\n{self.said()}"
            for addresses in self.home.rglob("run/addresses.json"):
                with contextlib.suppress(OSError, ValueError, urllib.error.URLError):
                    url = json.loads(addresses.read_text())["http"]
                    with urllib.request.urlopen(f"{url}/status?points=1", timeout=10) as answer:
                        told = json.load(answer)
                    if told["ready"]["ok"] or not ready:
                        return told["snapshot"]
            time.sleep(0.3)
        raise AssertionError(f"{line}: not ready: {self.said()}")

    def said(self) -> str:
        return (self.home / "out").read_text(errors="replace")[-3000:]


def here(line: str, **instead: str) -> str:
    """The command for this machine. Each text that is replaced has to be in it: a page that changes is read again."""
    for before, after in instead.values():
        assert before in line, line
        line = line.replace(before, after)
    return line


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def one(page: str, start: str, at: int = 0) -> str:
    """The `at`-th command of a page that begins so."""
    return [line for line in typed(page) if line.startswith(start)][at]


@pytest.mark.slow
@pytest.mark.swarm
@pytest.mark.timeout(900)
def test_the_readme_is_followed_to_the_letter(tmp_path):
    founder, member = Person(tmp_path / "founder"), Person(tmp_path / "member")
    port, other = str(free_port()), str(free_port())
    invite = founder.types(here(one("README.md", "swarmnode init"), place=("/ip4/203.0.113.5/tcp/9512", f"/ip4/127.0.0.1/tcp/{port}")))
    assert re.fullmatch(rf"/ip4/127\.0\.0\.1/tcp/{port}/p2p/12D3KooW\w+/swarm/[0-9a-f]{{64}}\n", invite)
    invite = invite.strip()
    with founder.runs(one("README.md", "swarmnode run", 1)) as snapshot:
        assert snapshot["node"]["swarm_name"] == "evening"
        joining = re.sub(r"'/ip4/203\.0\.113\.5/\S+'", shlex.quote(invite), one("README.md", "swarmnode join"))
        assert invite in joining
        with member.runs(joining) as snapshot:
            assert snapshot["node"]["swarm_name"] == "evening"
            assert "evening" in member.types("swarmnode status")
        member.types(here(one("README.md", "swarmnode config set"), port=("9512", other)))
        with member.runs(one("README.md", "swarmnode run")) as snapshot:
            assert f"/tcp/{other}/" in snapshot["node"]["addrs"][0]
        member.types(here(one("README.md", "swarmnode key backup"), place=("/media/stick", str(member.home))))
        assert (member.home / "node.key").stat().st_mode & 0o777 == 0o600
        member.types(one("README.md", "swarmnode export"))
        assert (member.home / "policy" / "config.json").is_file()
        member.types(one("README.md", "swarmnode completion") + " bash")
        assert "swarmnode" in (member.home / ".bashrc").read_text()
        assert "FAIL" not in member.types(one("README.md", "swarmnode doctor"))
        assert member.types(one("docs/join.md", "swarmnode key rotate"))
        member.types(here(one("docs/join.md", "swarmnode key import"), place=("/media/stick", str(member.home))) + " --replace")
        meeting = here(one("README.md", "swarmnode bootstrap"), it=("INVITE", invite))
        with Person(tmp_path / "meeting").runs(meeting, ready=False) as snapshot:
            assert not snapshot["node"]["trainer"]


@pytest.mark.slow
@pytest.mark.swarm
@pytest.mark.timeout(900)
def test_a_task_of_ones_own_is_brought_as_the_page_says(tmp_path):
    text = (ROOT / "docs" / "own-task.md").read_text()
    configurations = re.findall(r"```toml\n(# swarm\.toml\n.*?)```", text, re.S)
    modules = re.findall(r"```python\n(.*?)```", text, re.S)
    person = Person(tmp_path / "home")
    rows = [{"prompt": f"What is {a} + {b}?", "answer": str(a + b)} for a in range(2, 12) for b in range(2, 12)]
    (person.home / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (person.home / "wordtasks").mkdir()
    (person.home / "wordtasks" / "words.py").write_text(modules[0])  # `pip install ./wordtasks` puts it on the path, too

    (person.home / "swarm.toml").write_text(configurations[0])
    person.types(one("docs/own-task.md", "swarmnode task try data/sums"))
    with person.runs(one("docs/own-task.md", "swarmnode run")) as snapshot:
        assert snapshot["node"]["tasks"] == ["data/sums"]
    assert "10 questions" in person.types(one("docs/own-task.md", "swarmnode task try words:reverse"))
    (person.home / "swarm.toml").write_text(configurations[1])
    invite = person.types("swarmnode init -c swarm.toml -d other")
    assert "/swarm/" in invite
    assert "`swarmnode init -c swarm.toml`" in text

"""The commands of README and docs, typed into a shell in order, with real nodes.

Each part of a page is about one machine, which is a home directory here. World.replacements has the
values that a page cannot know (addresses, an invite). NOT_HERE names the commands that cannot run
here.
"""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import urllib.request
from contextlib import suppress
from pathlib import Path

from tests.support.terminal import typed
from tests.support.waiting import free_port

ROOT = Path(__file__).parents[2]
JOIN_AND_HOST = "docs/join-and-host.md"
PARTS = {
    "README": ("README.md", None),
    "two machines": (JOIN_AND_HOST, ("Two machines at home",)),
    "train alone": (JOIN_AND_HOST, ("", "Train alone first")),
    "join": (JOIN_AND_HOST, ("Join a swarm",)),
    "host": (JOIN_AND_HOST, ("Host a swarm", "Runbook: a public swarm")),
    "own task": ("docs/own-task.md", None),
    "operations": ("docs/operations.md", None),
    "engines": ("docs/engines-and-hardware.md", None),
    "stages": ("docs/stages.md", None),
    "move": ("docs/move.md", None),
}
"""Part → its page and the headings of its sections ("" is the text before the first heading). None:
the whole page."""

NOT_HERE = {
    r"make demo": "`make fresh` runs it",
    r"make test": "runs this",
    r"pip install (--no-deps )?-r requirements/": "`make fresh` installs them",
    r"uv tool install ": "needs a package index; `tests/deploy/test_setup.py` runs it",
    r"swarmnode (config set policy\.model=|plan )Qwen/": "needs the Hugging Face Hub",
    r"swarmnode config set --recipe 24gb-7b-lora": "needs a card of 24 GB and the Hub",
    r"swarmnode rollback \d+": "needs a state that is kept after a quarter of an hour",
    r"swarmnode run --set policy\.devices=cuda:0,cuda:2": "needs three GPUs",
    r"swarmnode run .*policy\.server\.url=": "needs a server; tests/unit/policy/test_served.py",
    r"swarmnode serve": "runs until Ctrl-C; tests/unit/cli/test_talk.py asks it",
    r"swarmnode demo --crew": "tests/swarm/test_crew_nodes.py kills members of a crew",
}
"""Commands that cannot be typed here, and the reason."""

MACHINES = {"swarmnode bootstrap INVITE": "small", "swarmnode key import": "new"}
"""Commands for which a page sends the reader to another machine."""
OWNERS = {
    "README": "member",
    "train alone": "newcomer",
    "join": "member",
    "host": "host",
    "own task": "author",
    "operations": "operator",
    "engines": "tuner",
    "stages": "stager",
}
"""Machine of a part in other cases."""

ANSWERS = {
    "swarmnode init --successor": [("[y/N]", "y")],
    "swarmnode chat": [("> ", "2+3="), ("> ", "\x04")],
}
"""Prompts of a command, and the replies."""


def text_of(part):
    """Return the Markdown of a part."""
    page, headings = PARTS[part]
    text = (ROOT / page).read_text()
    if headings is None:
        return text
    pieces = re.split(r"^## (.+)\n", text, flags=re.M)
    sections = {"": pieces[0]} | dict(zip(pieces[1::2], pieces[2::2], strict=True))
    return "\n".join(sections[heading] for heading in headings)


def shell_lines(text):
    """Return the commands of a text, without the comments behind them."""
    # Files are written, not typed.
    lines = re.sub(r"^```(?!\n).*?^```", "", text, flags=re.S | re.M).splitlines()
    shell = [
        match[1]
        for line in lines
        if (
            match := re.match(
                r"(?: {4}|\$ )((?:[A-Z_]+=\S+ )?(?:swarmnode|pip|uv|make|scp|tar|mkdir) .*)", line
            )
        )
    ]
    return [re.split(r"\s{2,}#|\s#\s", line)[0].strip() for line in shell]


def commands(part):
    return shell_lines(text_of(part))


def files(part):
    """Return (name, text) of every file that a part has the reader write."""
    text = text_of(part)
    named = re.findall(r"`([\w/.-]+)`:\n\n```\w+\n(.*?)^```", text, re.S | re.M)
    return named + re.findall(r"^```toml\n# (\w+\.toml)[^\n]*\n(.*?)^```", text, re.S | re.M)


class Machine:
    """A user's home on a machine, and the commands typed there."""

    def __init__(self, home):
        self.home = home
        home.mkdir(parents=True, mode=0o700)
        kept = {
            key: value
            for key, value in os.environ.items()
            if not key.startswith(("SWARMNODE_", "XDG_", "PYTHON"))
        }
        self.env = kept | {
            "HOME": str(home),
            "SHELL": "/bin/bash",
            "TERM": "dumb",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(home / "site"),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "SWARMNODE_HTTP_PORT": "0",
            "SWARMNODE_NETWORK_MDNS": "false",
            "SWARMNODE_TRAINING_MAX_STEPS": "1",
            "SWARMNODE_TRAINING_EVAL_EVERY": "1000",
            "SWARMNODE_POLICY_THREADS": "1",
        }
        self.data = home / ".local/state/swarmnode"
        self.prefix = []
        """Command that starts a shell on this machine."""

    def fetch(self, url):
        with urllib.request.urlopen(url, timeout=5) as answer:
            return answer.read()

    def types(self, line, answers=()):
        if self.prefix:
            line = shlex.join([*self.prefix, "bash", "-c", line])
        code, written = typed(line, self.env, self.home, answers, seconds=600)
        assert code == 0, f"{line}: {code}\n{written[-3000:]}"
        return written

    def starts(self, line, data=None, stays=False, text=""):
        """Start a node. stays: it does not end after one step, but takes few steps. text: its
        standard input."""
        env = self.env | (
            {"SWARMNODE_TRAINING_MAX_STEPS": "0", "SWARMNODE_TRAINING_STEP_INTERVAL": "30"}
            if stays
            else {}
        )
        return Node(self, line, env, data or self.data, text)


class LanMachine(Machine):
    """A machine in a namespace of a local network. Its node takes a step per second."""

    def __init__(self, home, net, name, address):
        super().__init__(home)
        self._net, self._name = net, name
        net.public(name, address)
        self.prefix = ["ip", "netns", "exec", Path(net.file(name)).name]
        for key in ("HTTP_PORT", "NETWORK_MDNS", "TRAINING_MAX_STEPS"):
            del self.env[f"SWARMNODE_{key}"]
        self.env["SWARMNODE_TRAINING_STEP_INTERVAL"] = "1"

    def fetch(self, url):
        return self._net.get(self._name, url, seconds=5)

    def moves(self, before, after):
        """Change the address of this machine, as a router does after a restart."""
        for change in (["del", f"{before}/24"], ["add", f"{after}/24"]):
            command = ["ip", "addr", *change, "dev", "outside"]
            self._net.run(self._name, command, check=True)


class Node:
    """A shell command that runs until it ends or is stopped."""

    def __init__(self, machine, line, env, data, text):
        self.line = line
        self._machine = machine
        self._addresses = data / "run" / "addresses.json"
        self._addresses.unlink(missing_ok=True)
        self._log = machine.home / "node.log"
        with open(self._log, "wb") as log:
            self._process = subprocess.Popen(
                [*machine.prefix, "bash", "-c", line],
                env=env,
                cwd=machine.home,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        with self._process.stdin as stdin:
            stdin.write(text.encode())

    def until(self, condition, seconds=600.0):
        """Wait until the snapshot of its status page satisfies `condition`."""
        late = time.monotonic() + seconds
        while time.monotonic() < late:
            assert self._process.poll() is None, self.log_tail()
            with suppress(OSError, ValueError, KeyError):
                url = json.loads(self._addresses.read_text())["http"]
                if condition(json.loads(self._machine.fetch(f"{url}/status?points=1"))["snapshot"]):
                    return self
            time.sleep(0.3)
        raise AssertionError(self.log_tail())

    def ends(self, seconds=600.0):
        """Wait until the node ends with exit code 0, without a signal."""
        assert self._process.wait(seconds) == 0, self.log_tail()

    def stop(self):
        """Stop the node and expect success."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGTERM)
        self.ends()

    def kill(self):
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def log_tail(self):
        return f"{self.line}\n{self._log.read_text(errors='replace')[-3000:]}"


def trains(snapshot):
    return snapshot["trainer"]["report"] and snapshot["trainer"]["report"]["step"] >= 1


def has_peers(snapshot):
    return snapshot["network"]["peers"]["connected"]


class World:
    """The machines, the values that pages cannot know, and the commands typed so far."""

    def __init__(self, root):
        self._root = root
        self._machines = {}
        self.nodes = []
        self.done = set()
        self.replacements = {
            'listen_addrs=["/ip4/0.0.0.0/tcp/9512"]\' '
            '--set \'network.announce_addrs=["/ip4/203.0.113.5/tcp/9512"]': (
                f'listen_addrs=["/ip4/127.0.0.1/tcp/{free_port()}"]'
            ),
            "/ip4/0.0.0.0/tcp/9512": "/ip4/127.0.0.1/tcp/0",
            "/media/stick/": f"{root}/",
            "/var/lib/boot": f"{root}/boot",
            "/dns4/swarm.example.org/tcp/9512": "/ip4/127.0.0.1/tcp/9512",
            "Qwen/Qwen2.5-0.5B-Instruct": "embedded",
            "Qwen/Qwen3-4B": "embedded",
            # fewer answers of SmolLM2, for time
            "--samples 4": "--samples 2 --questions 24",
            "try chat/json_fields": "try chat/json_fields --no-sample",
            "<that peer id>": "12D3KooWK99VoVxNE7XzyBwXEzW7xhK7Gpv85r9F3V3fyKSUKPH5",
            'revision = "7ae557604adf67be50417f59c2c2f167def9a775"\n': "",
            "scp ": "cp ",
            " boot:": " .",
            "pip install ./wordtasks": (
                f"pip install -q --no-deps --no-build-isolation --target {root}/author/site"
                " ./wordtasks"
            ),
        }

    def machine(self, name):
        if name not in self._machines:
            self._machines[name] = Machine(self._root / name)
        return self._machines[name]

    def here(self, text):
        """Return a text of a page with the values of this machine."""
        for text_of_page, value in self.replacements.items():
            text = text.replace(text_of_page, value)
        return text

    def writes(self, part):
        machine = self.machine(OWNERS[part])
        for name, text in files(part):
            path = machine.home / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(self.here(text))
        return machine

    def starts(self, name, line, data=None, stays=False):
        node = self.machine(name).starts(line, data, stays)
        self.nodes.append(node)
        return node


def who(part, line):
    return next(
        (machine for command, machine in MACHINES.items() if line.startswith(command)), OWNERS[part]
    )


def not_here(line):
    return any(re.match(pattern, line) for pattern in NOT_HERE)


def follow(world, part):
    """Type the commands of a part, except those already typed on that machine. Yield (line,
    output); nodes have ended by then."""
    world.writes(part)
    for line in commands(part):
        typed_once = (who(part, line), world.here(line))
        if not (
            not_here(line)
            or typed_once in world.done
            or ("founder", world.here(line)) in world.done
        ):
            world.done.add(typed_once)
            yield line, obeyed(world, *typed_once)


def obeyed(world, name, line):
    """Run a command and return its output."""
    if line.startswith("swarmnode join"):
        world.starts(name, line, stays=True).until(
            lambda snapshot: has_peers(snapshot) and trains(snapshot)
        ).stop()
    elif line.startswith("swarmnode bootstrap --manifest"):
        world.starts(name, line, Path(world.here("/var/lib/boot"))).until(
            lambda snapshot: snapshot["node"]["swarm"]
        ).stop()
    elif line.startswith("swarmnode bootstrap"):
        world.starts(name, line).until(has_peers).stop()
    elif re.search(r"\bswarmnode run\b", line):
        world.starts(name, line).ends()
    else:
        answers = next(
            (given for command, given in ANSWERS.items() if line.startswith(command)), ()
        )
        return world.machine(name).types(line, answers)
    return ""

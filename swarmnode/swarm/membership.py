"""Founding a swarm and joining one, before any process of the node runs.

    draft     configuration, previous manifest ─ child: hash the model ─▶ manifest
    found     manifest ─▶ signed, stored, chosen ─▶ invite
    join      invite ─ child: fetch over libp2p ─▶ verify ─ can honour? ─▶ stored, chosen
    prepare   stored manifest ─ can honour? ─▶ the configuration to run with

Neither libp2p nor torch is loaded here: both run in child processes that end before the node
starts.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from swarmnode import settings
from swarmnode.config import Config
from swarmnode.errors import BY_EXIT_CODE, BadMessage, ConfigError, Refused, Unavailable
from swarmnode.files import locked_data_dir, make_data_dir, read_private, write_file
from swarmnode.install import check_torch
from swarmnode.model_defaults import EMBEDDED
from swarmnode.policy import published
from swarmnode.policy.convert import prepare
from swarmnode.swarm import invite as invites
from swarmnode.swarm import manifest, manifest_store, successor
from swarmnode.swarm.invite import Invite
from swarmnode.swarm.manifest import Terms
from swarmnode.swarm.manifest_store import ManifestStore
from swarmnode.swarm.requirements import can_honour, refuse_if_any
from swarmnode.wire import limits
from swarmnode.wire.manifest import VerifiedManifest, follows, open_manifest, seal_manifest
from swarmnode.wire.messages import ModelRef, SwarmManifest

log = structlog.get_logger("swarmnode.swarm.manifest")

JOIN_SECONDS = 90.0
DESCRIBE_SECONDS = 3600.0
"""Timeout for hashing the model, which may have to be downloaded first."""


@dataclass(frozen=True)
class FoundingRequest:
    """Options of `swarmnode init` beyond the configuration."""

    bootstrap: Sequence[str] = ()
    """Multiaddrs with peer ids; empty uses the addresses of this node."""
    members: Sequence[str] = ()
    private: bool = False
    """Require a secret: the existing one, or a new one."""
    any_model: bool = False
    successor: bool = False
    public: bool = False
    """The successor has neither a member list nor a secret."""
    explicit_settings: Mapping[str, str] = field(default_factory=dict)
    """Configuration keys set by the operator, with their origin."""


@dataclass(frozen=True)
class Draft:
    """An unsigned manifest."""

    manifest: SwarmManifest
    before: VerifiedManifest | None
    """The predecessor, if this is a successor."""
    config: Config
    """The configuration that it describes."""


@dataclass(frozen=True)
class ResolvedNode:
    """Configuration and swarm with which a node would start."""

    config: Config
    """With the terms of the swarm's manifest."""
    swarm: bytes
    """Swarm id; empty without a manifest."""
    secret: bytes | None
    """Secret of a private swarm."""


class Membership:
    """Founding, joining and following a swarm, and the configuration to run with.

    Args:
        config: configuration of the node.
        trains: False for a bootstrap node, which needs neither the swarm's tasks nor its model.
    """

    def __init__(self, config: Config, *, trains: bool = True) -> None:
        self._config = config
        self._data_dir = config.node.data_dir
        self._trains = trains
        self.store = ManifestStore(self._data_dir)

    # ---- founding --------------------------------------------------------------------------------

    def draft(self, options: FoundingRequest) -> Draft:
        """Return the manifest of a swarm with this configuration. A successor keeps every term that
        the operator has not set.

        Raises:
            ConfigError: the configuration cannot be founded.
            Refused: this key cannot found a swarm here.
            Unavailable: the model or the data directory cannot be used.
        """
        from swarmnode.p2p.identity import load_or_create
        from swarmnode.p2p.listening import addresses_to_advertise

        make_data_dir(self._data_dir)
        before = manifest_store.load_current(self._data_dir)
        identity = load_or_create(self._data_dir / "identity.key")
        founder = identity.private_key.public_key().public_bytes_raw()
        _refuse_founding(before, founder, options)
        own = [
            f"{address}/p2p/{identity.peer_id}"
            for address in addresses_to_advertise(self._config.network, self._data_dir)
        ]
        own = own[: limits.BOOTSTRAP_ADDRESSES]
        now = int(time.time() * 1000)
        if before is None:
            bootstrap = invites.check_addresses(list(options.bootstrap) or own, "init: --bootstrap")
            secret = self._own_secret() if options.private else None
            terms = Terms(now, None, bootstrap, _check_members(options.members), secret)
            models = [] if options.any_model else [self._describe_model()]
            return Draft(manifest.draft(self._config, founder, models, terms), None, self._config)
        present = before.manifest
        if now <= present.created_at:
            raise ConfigError(
                "init: this machine's clock is behind the signing time of the predecessor: correct"
                " the clock"
            )
        self._config = self._successor_config(options.explicit_settings, before)
        moved = any(
            key in options.explicit_settings
            for key in ("network.listen_addrs", "network.announce_addrs")
        )
        named = list(options.bootstrap) or (
            successor.successor_addresses(present, identity.peer_id, own)
            if moved
            else present.bootstrap
        )
        bounds = None
        if "training.num_generations" not in options.explicit_settings:
            bounds = (present.rollouts.min_completions, present.rollouts.max_completions)
        members = [] if options.public else list(options.members) or present.access.members
        terms = Terms(
            now,
            bounds,
            invites.check_addresses(named[: limits.BOOTSTRAP_ADDRESSES], "init: --bootstrap"),
            _check_members(members),
            self._successor_secret(options, present),
            before.swarm,
        )
        return Draft(
            manifest.draft(self._config, founder, self._successor_models(options, present), terms),
            before,
            self._config,
        )

    def found(self, draft: Draft) -> tuple[VerifiedManifest, Invite]:
        """Sign a draft with this node's key, store and choose it.

        Raises:
            ConfigError: the draft does not fit into a manifest.
            Unavailable: it cannot be written.
        """
        from swarmnode.p2p.identity import load_or_create

        identity = load_or_create(self._data_dir / "identity.key")
        try:
            opened = seal_manifest(draft.manifest, identity.private_key)
        except BadMessage as error:
            raise ConfigError(
                f"init: this configuration does not fit into a manifest: {error}"
            ) from None
        self.store.add(opened)
        self.store.choose(opened.swarm)
        return opened, make_invite(opened)

    def _successor_config(
        self, explicit_settings: Collection[str], before: VerifiedManifest
    ) -> Config:
        """Return the configuration for a successor: keys that the operator has not set keep the
        values of the manifest `before`. Raises ConfigError."""
        kept, _ = manifest.apply_terms(self._config, before)
        return settings.replaced(
            kept,
            {
                key: settings.value(self._config, key)
                for key in successor.DRAFT_KEYS
                if key in explicit_settings
            },
            "init",
        )

    def _successor_models(self, options: FoundingRequest, present: SwarmManifest) -> list[ModelRef]:
        """Return the models of a successor. The model is loaded and hashed again only if the
        operator has set it."""
        where = options.explicit_settings.get("policy.model") or options.explicit_settings.get(
            "policy.revision"
        )
        saved_only = where == str(settings.saved_file(self._data_dir))
        if options.any_model or (not present.models and (where is None or saved_only)):
            return []
        return present.models if where is None else [self._describe_model()]

    def _successor_secret(self, options: FoundingRequest, present: SwarmManifest) -> bytes | None:
        """Return the secret of a successor: the present one, another with --private, none with
        --public."""
        if options.private:
            return self._own_secret()
        if options.public or not present.access.secret:
            return None
        secret = manifest.swarm_secret(self._data_dir)
        if secret is None or manifest.commitment(secret) != present.access.secret:
            raise Refused(
                "the secret of this private swarm is missing: restore it, or use --private for"
                " another one, or --public"
            )
        return secret

    def _describe_model(self) -> ModelRef:
        prepare(self._config.policy.model)
        found = self._run_child("swarmnode.policy.describe", DESCRIBE_SECONDS)
        return ModelRef(
            found["name"],
            found["revision"],
            bytes.fromhex(found["fingerprint"]),
            bytes.fromhex(found["tokenizer"]),
        )

    def _own_secret(self) -> bytes:
        """Return this node's secret; create it if there is none."""
        secret = manifest.swarm_secret(self._data_dir)
        if secret is None:
            secret = os.urandom(limits.SECRET_BYTES)
            write_file(self._data_dir / manifest.SECRET_FILE, f"{secret.hex()}\n".encode())
        return secret

    # ---- joining ---------------------------------------------------------------------------------

    def join(self, invite: Invite) -> VerifiedManifest:
        """Fetch, store and choose the manifest of an invite, or its latest successor if this node
        follows the founder.

        Nothing is changed on failure.

        Raises:
            Unavailable: no peer was reached.
            Refused: no peer had the manifest, or this node cannot honour it.
        """
        store = self.store
        with locked_data_dir(self._data_dir):
            before = store.current()
            if (
                before is not None
                and not store.descends(before, invite.swarm)
                and not store.descends(invite.swarm, before)
            ):
                self._refuse_other_swarm(before)
            opened, successor, peer = self._fetch(invite)
            if successor is not None and self._config.swarm.follow == "founder":
                store.add(opened)
                store.add_successor(opened, successor)
                opened = store.latest(opened.swarm) or opened
            elif successor is not None:
                log.warning(
                    "the founder has signed a successor of this swarm",
                    name=successor.manifest.name,
                    swarm=successor.swarm.hex(),
                )
            refuse_if_any(self._problems(opened.manifest, peer), opened)
            store.add(opened)
            store.choose(opened.swarm)
            store.save_peers(invite.addresses)
        log.info("joined", name=opened.manifest.name, swarm=opened.swarm.hex())
        return opened

    def adopt(self, path: Path) -> VerifiedManifest:
        """Store and choose the signed manifest in a file, for a bootstrap node without a peer that
        serves it. Raises the errors of `join`."""
        try:
            opened = open_manifest(path.read_bytes()[: limits.MANIFEST_BYTES + 1])
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}") from None
        except BadMessage as error:
            raise Refused(f"{path} is not a manifest: {error}") from None
        before = manifest_store.load_current(self._data_dir)
        if (
            before is not None
            and not self.store.descends(before.swarm, opened.swarm)
            and not follows(opened, before)
        ):
            if opened.manifest.predecessor == before.swarm:
                raise Refused(
                    f"{path} is a successor that the founder of {before.manifest.name!r} did not"
                    " sign: request the right one from the founder"
                )
            self._refuse_other_swarm(before.swarm)
        make_data_dir(self._data_dir)
        refuse_if_any(self._problems(opened.manifest), opened)
        self.store.add(opened)
        self.store.choose(opened.swarm)
        return opened

    def follow(self) -> VerifiedManifest:
        """Choose the latest stored successor; a running node restarts with it. Raises Refused if
        there is none that this node can honour."""
        opened = manifest_store.load_current(self._data_dir)
        latest = self.store.latest(opened.swarm) if opened is not None else None
        if opened is None or latest is None or latest.swarm == opened.swarm:
            raise Refused("no successor is known here; a running node learns of one from its peers")
        refuse_if_any(self._problems(latest.manifest), latest)
        self.store.choose(latest.swarm)
        return latest

    def read_secret(self, file: Path) -> bytes:
        """Return the swarm's secret in a file.

        Raises:
            Refused: others can read `file`.
            ConfigError: the file does not hold a secret.
        """
        data = read_private(file, "swarm secret", 4096)
        if data is None:
            raise ConfigError(f"--secret-file {file}: no such file")
        return manifest.parse_secret(data, file)

    def keep_secret(self, secret: bytes) -> None:
        """Write a swarm's secret into the data directory with mode 0600. Raises Unavailable."""
        make_data_dir(self._data_dir)
        write_file(self._data_dir / manifest.SECRET_FILE, f"{secret.hex()}\n".encode())

    def _problems(self, wanted: SwarmManifest, peer: str = "") -> list[str]:
        return can_honour(wanted, self._config, peer, trains=self._trains)

    def _fetch(self, invite: Invite) -> tuple[VerifiedManifest, VerifiedManifest | None, str]:
        """Return (manifest, successor, own peer id) from the child, verified again in this
        process."""
        log.info(
            "waiting for a peer of the invite to send the manifest",
            addresses=list(invite.addresses),
            at_most_seconds=JOIN_SECONDS,
        )
        answer = self._run_child("swarmnode.swarm.join", JOIN_SECONDS, str(invite))
        try:
            opened = open_manifest(bytes.fromhex(answer["manifest"]))
            successor = (
                open_manifest(bytes.fromhex(answer["successor"])) if answer["successor"] else None
            )
        except BadMessage as error:
            raise Refused(f"the manifest is not valid: {error}") from None
        if opened.swarm != invite.swarm or (
            successor is not None and not follows(successor, opened)
        ):
            raise Refused("the manifest does not belong to the invite")
        return opened, successor, answer["peer"]

    def _refuse_other_swarm(self, before: bytes) -> None:
        opened = self.store.get(before)
        name = repr(opened.manifest.name) if opened is not None else before.hex()[:16]
        raise Refused(
            f"this data directory belongs to swarm {name}: use another --data-dir for another swarm"
        )

    # ---- running ---------------------------------------------------------------------------------

    def prepare(self) -> Config:
        """Return the configuration to run with: join by `swarm.invite` if necessary, then apply the
        swarm's terms. Logs the changes.

        Raises the errors of `join`.
        """
        if self._config.swarm.invite:
            invite = invites.parse(self._config.swarm.invite)
            current = self.store.current()
            if current is None or not self.store.descends(current, invite.swarm):
                self.join(invite)
            self.store.save_peers(invite.addresses)
        agreed, changes = manifest_store.apply_stored(self._config, trains=self._trains)
        if self._trains and published.fetch_config(agreed.policy.model, agreed.policy.revision):
            # Its size is known now, from which the default learning rate follows.
            self._config = settings.replaced(self._config, {}, "configuration")
            agreed, changes = manifest_store.apply_stored(self._config)
        self._log_pending_successor()
        for change in changes:
            if change.key != "swarm.id" and not change.reorders:
                if change.overrules:
                    log.warning(
                        "the swarm's manifest replaces a setting of yours",
                        key=change.key,
                        value=change.now,
                        yours=change.was,
                    )
                else:
                    log.info("the swarm's manifest sets", key=change.key, value=change.now)
        unset = [key for key in settings.MODEL_DEPENDENT_KEYS if not settings.is_set(agreed, key)]
        if self._trains and unset and agreed.policy.model != EMBEDDED:
            chosen = {key.rpartition(".")[2]: settings.value(agreed, key) for key in sorted(unset)}
            log.info("defaults for this model", model=agreed.policy.model, **chosen)
        return agreed

    def _log_pending_successor(self) -> None:
        """Log a warning if a successor is pending."""
        opened = manifest_store.load_current(self._data_dir)
        waiting = (
            self.store.successor(opened)
            if opened is not None and self._config.swarm.follow != "never"
            else None
        )
        if waiting is not None:
            log.warning(
                "a successor of this swarm is pending, adopt it with `swarmnode manifest follow`",
                name=waiting.manifest.name,
            )

    def resolve(self) -> ResolvedNode:
        """Return what the next start would use, as far as it is known without joining. Changes
        nothing. Raises the errors of `prepare`."""
        opened = manifest_store.load_current(self._data_dir)
        secret = manifest.swarm_secret(self._data_dir)
        if opened is None and self._config.swarm.invite:
            invite = invites.parse(self._config.swarm.invite)
            known = dict.fromkeys([*self._config.network.initial_peers, *invite.addresses])
            config = settings.replaced(
                self._config, {"network.initial_peers": list(known)}, "swarm.invite"
            )
            return ResolvedNode(config, invite.swarm, secret)
        return ResolvedNode(self.refresh(), opened.swarm if opened is not None else b"", secret)

    def refresh(self) -> Config:
        """Return the configuration by the manifest that is chosen now, for a running node."""
        return manifest_store.apply_stored(self._config, trains=self._trains)[0]

    def _run_child(self, module: str, seconds: float, *arguments: str) -> dict[str, str]:
        """Run a short-lived child and return the JSON that it printed. Its errors are raised here
        with their exit codes."""
        make_data_dir(self._data_dir)
        config_file = self._data_dir / "run" / f"{module.rpartition('.')[2]}.json"
        write_file(config_file, self._config.model_dump_json().encode())
        try:
            done = subprocess.run(
                [sys.executable, "-m", module, "--config", str(config_file), *arguments],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=seconds,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise Unavailable(f"{module} did not finish within {seconds:g} s") from None
        if done.returncode == 0:
            printed: dict[str, str] = json.loads(done.stdout.strip().splitlines()[-1])
            return printed
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        if done.returncode not in BY_EXIT_CODE:
            check_torch()  # after a crash: torch is the package that most often fails to load
        raise BY_EXIT_CODE.get(done.returncode, Unavailable)(
            last.partition(": ")[2] or done.stderr.strip()[-300:]
        )


def make_invite(opened: VerifiedManifest) -> Invite:
    """Return an invite to the swarm of a manifest. Raises ConfigError without an address."""
    where = tuple(manifest.bootstrap(opened.manifest))
    if not where:
        raise ConfigError(
            "the manifest names no bootstrap peer: an invite needs the address of one"
        )
    return Invite(where, opened.swarm)


def _refuse_founding(
    before: VerifiedManifest | None, founder: bytes, options: FoundingRequest
) -> None:
    """Check that this key may found a swarm here. `before` is the stored manifest. Raises
    ConfigError or Refused."""
    if options.successor and before is None:
        raise ConfigError("init: --successor needs a manifest in this data directory")
    if options.public and not options.successor:
        raise ConfigError(
            "init: --public is for a --successor; a first manifest is public unless it has a"
            " --member or is --private"
        )
    if options.public and (options.private or options.members):
        raise ConfigError("init: --public contradicts --private and --member")
    if options.successor and before is not None and before.manifest.founder != founder:
        raise Refused("only the founder's key can sign a successor; this node is not the founder")
    if before is not None and not options.successor:
        name = before.manifest.name
        raise Refused(
            f"this data directory already belongs to swarm {name!r}: sign a --successor, or found"
            " another swarm in another --data-dir"
        )


def _check_members(members: Sequence[str]) -> list[str]:
    from swarmnode.p2p.addresses import check_peer_id

    for member in members:
        try:
            check_peer_id(member)
        except ValueError as error:
            raise ConfigError(
                f"init: --member {member[:80]!r}: {error}; `swarmnode key show` prints one"
            ) from None
    return list(members)

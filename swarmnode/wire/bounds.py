"""Whether the values of a decoded message lie where protocol/02-rollouts.md allows them. Types were checked by the decoder.

Also for our own messages before they are signed: nobody should be rejected by the swarm for a local bug.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np

from swarmnode.errors import BadMessage
from swarmnode.wire import limits
from swarmnode.wire.messages import (
    Announce,
    BulkManifest,
    BulkManifestRequest,
    BulkManifestResponse,
    BulkRequest,
    BulkResponse,
    BulkSocketRequest,
    BulkSocketResponse,
    Completion,
    Envelope,
    FetchRequest,
    FetchResponse,
    ManifestRequest,
    ManifestResponse,
    PeersRequest,
    PeersResponse,
    RolloutGroup,
    RolloutRules,
    SamplingParams,
    Session,
    SessionResponse,
    Summary,
    SummaryRequest,
    SummaryResponse,
    SwarmManifest,
    TaskRef,
)
from swarmnode.wire.tensors import ITEM_BYTES, unpack_logprobs


def check_message(message: Any) -> None:
    """Raises BadMessage("bounds") or BadMessage("not_finite") when a value of `message` is not allowed."""
    _CHECKS[type(message)](message)


def check_group(group: RolloutGroup) -> None:
    """Raises BadMessage("bounds") or BadMessage("not_finite") when a value of `group` is not allowed."""
    _check_task(group.task)
    _length("model", group.model, limits.FINGERPRINT_BYTES)
    _length("tokenizer", group.tokenizer, limits.FINGERPRINT_BYTES)
    _counter("policy_version", group.policy_version)
    _counter("created_at", group.created_at)
    _counter("sequence", group.sequence)
    _check_sampling(group.sampling)
    _between("completions", len(group.completions), limits.MIN_COMPLETIONS, limits.COMPLETIONS)
    for completion in group.completions:
        _check_completion(completion, group.sampling.max_tokens)


def _check_task(task: TaskRef) -> None:
    _name("task.id", task.id, limits.TASK_ID_BYTES)
    _name("task.version", task.version, limits.VERSION_BYTES)
    _counter("task.seed", task.seed)
    if task.seed % 2**limits.INDEX_BITS:
        raise BadMessage("bounds", "task.seed is not the start of a block")
    _between("task.index", task.index, 0, 2**limits.INDEX_BITS - 1)
    _between("task.difficulty", task.difficulty, 0, limits.DIFFICULTY)


def _check_sampling(sampling: SamplingParams) -> None:
    _finite("sampling.temperature", sampling.temperature)
    _finite("sampling.top_p", sampling.top_p)
    if not 0 < sampling.temperature <= limits.TEMPERATURE:
        raise BadMessage("bounds", "sampling.temperature")
    if not 0 < sampling.top_p <= 1:
        raise BadMessage("bounds", "sampling.top_p")
    _between("sampling.max_tokens", sampling.max_tokens, 1, limits.TOKENS)


def _check_completion(completion: Completion, max_tokens: int) -> None:
    if len(_utf8("text", completion.text)) > limits.TEXT_BYTES:
        raise BadMessage("bounds", "text is too long")
    _between("tokens", completion.tokens, 1, max_tokens)
    _finite("logprob", completion.logprob)
    if not limits.TOKEN_LOGPROB * completion.tokens <= completion.logprob <= 0:
        raise BadMessage("bounds", "logprob")
    for name in ("token_ids", "logprobs"):
        packed = getattr(completion, name)
        if packed and len(packed) != ITEM_BYTES * completion.tokens:
            raise BadMessage("bounds", f"{name} does not have one item per token")
    if completion.logprobs:
        logprobs = unpack_logprobs(completion.logprobs)  # (tokens,)
        if not np.isfinite(logprobs).all():
            raise BadMessage("not_finite", "logprobs")
        if logprobs.max() > limits.LOGPROB_SLACK or logprobs.min() < limits.TOKEN_LOGPROB:
            raise BadMessage("bounds", "logprobs")


def _check_announce(announce: Announce) -> None:
    _length("content", announce.content, limits.CONTENT_ID_BYTES)
    _between("size", announce.size, 1, limits.GROUP_BYTES)
    _counter("created_at", announce.created_at)
    _counter("sequence", announce.sequence)


def _check_envelope(envelope: Envelope) -> None:
    _length("key", envelope.key, limits.KEY_BYTES)
    _length("signature", envelope.signature, limits.SIGNATURE_BYTES)


def _check_fetch_request(request: FetchRequest) -> None:
    _length("content", request.content, limits.CONTENT_ID_BYTES)


def _check_fetch_response(response: FetchResponse) -> None:
    if bool(response.body) != (response.status == "ok"):
        raise BadMessage("bounds", "a body comes with `ok` and only with it")
    _between("body", len(response.body), 0, limits.GROUP_BYTES)


def _check_peers_request(request: PeersRequest) -> None:
    _length("swarm", request.swarm, limits.SWARM_ID_BYTES)
    _check_addresses(request.addresses)


def _check_peers_response(response: PeersResponse) -> None:
    _length("swarm", response.swarm, limits.SWARM_ID_BYTES)
    _between("peers", len(response.peers), 0, limits.PEERS)
    for peer in response.peers:
        _name("peer", peer.peer, limits.PEER_ID_BYTES)
        _check_addresses(peer.addresses)


def _check_addresses(addresses: list[str]) -> None:
    _between("addresses", len(addresses), 0, limits.PEER_ADDRESSES)
    for address in addresses:
        _name("address", address, limits.ADDRESS_BYTES)


def _check_manifest(manifest: SwarmManifest) -> None:
    _text("name", manifest.name, 1, limits.MANIFEST_NAME_BYTES)
    _length("founder", manifest.founder, limits.KEY_BYTES)
    _counter("created_at", manifest.created_at)
    if manifest.predecessor:
        _length("predecessor", manifest.predecessor, limits.SWARM_ID_BYTES)
    _name("minimum_version", manifest.minimum_version, limits.MINIMUM_VERSION_BYTES)
    _rising("protocols", manifest.protocols, 1, limits.PROTOCOL_IDS)
    for protocol in manifest.protocols:
        _name("protocol", protocol, limits.PROTOCOL_BYTES)
    _between("models", len(manifest.models), 0, limits.MODELS)
    for model in manifest.models:
        _name("models.name", model.name, limits.MODEL_NAME_BYTES)
        if model.revision:
            _name("models.revision", model.revision, limits.REVISION_BYTES)
        _length("models.fingerprint", model.fingerprint, limits.FINGERPRINT_BYTES)
        _length("models.tokenizer", model.tokenizer, limits.FINGERPRINT_BYTES)
    _rising("tasks", [task.id for task in manifest.tasks], 1, limits.TASKS)
    for task in manifest.tasks:
        _name("tasks.id", task.id, limits.TASK_ID_BYTES)
        _name("tasks.version", task.version, limits.VERSION_BYTES)
        _text("tasks.settings", task.settings, 0, limits.SETTING_VALUE_BYTES)
    _check_rules(manifest.rollouts)
    _rising("settings", [setting.key for setting in manifest.settings], 0, limits.SETTINGS)
    for setting in manifest.settings:
        _name("settings.key", setting.key, limits.SETTING_KEY_BYTES)
        _text("settings.value", setting.value, 1, limits.SETTING_VALUE_BYTES)
    _between("bootstrap", len(manifest.bootstrap), 0, limits.BOOTSTRAP_ADDRESSES)
    for address in manifest.bootstrap:
        _name("bootstrap", address, limits.ADDRESS_BYTES)
    _rising("members", manifest.access.members, 0, limits.MEMBERS)
    for member in manifest.access.members:
        _name("members", member, limits.PEER_ID_BYTES)
    if manifest.access.secret:
        _length("secret", manifest.access.secret, limits.SECRET_BYTES)


def _check_rules(rules: RolloutRules) -> None:
    _between("min_completions", rules.min_completions, limits.MIN_COMPLETIONS, limits.COMPLETIONS)
    _between("max_completions", rules.max_completions, rules.min_completions, limits.COMPLETIONS)
    _check_sampling(SamplingParams(rules.temperature, rules.top_p, rules.max_tokens))
    _finite("groups_per_second", rules.groups_per_second)
    if not 0 < rules.groups_per_second <= limits.GROUPS_PER_SECOND:
        raise BadMessage("bounds", "groups_per_second")


def _check_manifest_request(request: ManifestRequest) -> None:
    _length("swarm", request.swarm, limits.SWARM_ID_BYTES)


def _check_manifest_response(response: ManifestResponse) -> None:
    _between("manifest", len(response.manifest), 0, limits.MANIFEST_BYTES)
    _between("successor", len(response.successor), 0, limits.MANIFEST_BYTES if response.manifest else 0)


def _check_session(session: Session) -> None:
    _length("session", session.session, limits.SESSION_BYTES)
    _counter("started_at", session.started_at)
    _counter("issued_at", session.issued_at)


def _check_session_response(response: SessionResponse) -> None:
    _between("sessions", len(response.sessions), 0, limits.SESSIONS)
    for session in response.sessions:
        _between("session", len(session), 1, limits.SESSION_REQUEST_BYTES)


def _check_summary(summary: Summary) -> None:
    _text("name", summary.name, 0, limits.SUMMARY_NAME_BYTES)
    _name("version", summary.version, limits.MINIMUM_VERSION_BYTES)
    for name in ("created_at", "uptime", "step", "policy_version", "published", "peers"):
        _counter(name, getattr(summary, name))
    _finite("reward", summary.reward)
    if summary.reward != -1 and not 0 <= summary.reward <= 1:
        raise BadMessage("bounds", "reward is 0 to 1, or -1")


def _check_summary_request(request: SummaryRequest) -> None:
    _between("summary", len(request.summary), 0, limits.SUMMARY_BYTES)


def _check_summary_response(response: SummaryResponse) -> None:
    _between("summaries", len(response.summaries), 0, limits.SUMMARIES)
    for summary in response.summaries:
        _between("summary", len(summary), 1, limits.SUMMARY_BYTES)


def _check_bulk_manifest(manifest: BulkManifest) -> None:
    _length("transfer", manifest.transfer, limits.TRANSFER_BYTES)
    _between("chunk_bytes", manifest.chunk_bytes, limits.BULK_MIN_CHUNK_BYTES, limits.BULK_CHUNK_BYTES)
    _between("size", manifest.size, 1, limits.BULK_CHUNKS * manifest.chunk_bytes)
    _length("hashes", manifest.hashes, -(-manifest.size // manifest.chunk_bytes) * limits.CHUNK_HASH_BYTES)


def _check_bulk_manifest_request(request: BulkManifestRequest) -> None:
    _length("transfer", request.transfer, limits.TRANSFER_BYTES)


def _check_bulk_manifest_response(response: BulkManifestResponse) -> None:
    if bool(response.manifest) != (response.status == "ok"):
        raise BadMessage("bounds", "a manifest comes with `ok` and only with it")
    _between("manifest", len(response.manifest), 0, limits.BULK_MANIFEST_BYTES)


def _check_bulk_request(request: BulkRequest) -> None:
    _length("transfer", request.transfer, limits.TRANSFER_BYTES)
    _length("root", request.root, limits.CHUNK_HASH_BYTES)
    _between("wanted", len(request.wanted), 1, limits.BULK_CHUNKS // 8)
    if not any(request.wanted):
        raise BadMessage("bounds", "nothing is wanted")


def _check_bulk_response(response: BulkResponse) -> None:
    low, high = (1, limits.BULK_CHUNKS * limits.BULK_CHUNK_BYTES) if response.status == "ok" else (0, 0)
    _between("size", response.size, low, high)


def _check_bulk_socket_request(request: BulkSocketRequest) -> None:
    _length("transfer", request.transfer, limits.TRANSFER_BYTES)
    _length("root", request.root, limits.CHUNK_HASH_BYTES)


def _check_bulk_socket_response(response: BulkSocketResponse) -> None:
    ok = response.status == "ok"
    _between("port", response.port, int(ok), 65535 if ok else 0)
    _length("token", response.token, limits.TOKEN_BYTES if ok else 0)


_CHECKS: dict[type, Callable[[Any], None]] = {
    RolloutGroup: check_group,
    Announce: _check_announce,
    Envelope: _check_envelope,
    FetchRequest: _check_fetch_request,
    FetchResponse: _check_fetch_response,
    PeersRequest: _check_peers_request,
    PeersResponse: _check_peers_response,
    SwarmManifest: _check_manifest,
    ManifestRequest: _check_manifest_request,
    ManifestResponse: _check_manifest_response,
    Session: _check_session,
    SessionResponse: _check_session_response,
    Summary: _check_summary,
    SummaryRequest: _check_summary_request,
    SummaryResponse: _check_summary_response,
    BulkManifest: _check_bulk_manifest,
    BulkManifestRequest: _check_bulk_manifest_request,
    BulkManifestResponse: _check_bulk_manifest_response,
    BulkRequest: _check_bulk_request,
    BulkResponse: _check_bulk_response,
    BulkSocketRequest: _check_bulk_socket_request,
    BulkSocketResponse: _check_bulk_socket_response,
}


def _length(name: str, value: bytes, length: int) -> None:
    if len(value) != length:
        raise BadMessage("bounds", f"{name} is {length} bytes")


def _between(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise BadMessage("bounds", f"{name} is {low} to {high}")


def _counter(name: str, value: int) -> None:
    _between(name, value, 0, 2**limits.INTEGER_BITS - 1)


def _finite(name: str, value: float) -> None:
    if not math.isfinite(value):
        raise BadMessage("not_finite", name)


def _utf8(name: str, value: str) -> bytes:
    try:
        return value.encode()
    except UnicodeEncodeError:  # a lone surrogate: cannot come off the wire, but out of a local tokenizer
        raise BadMessage("bounds", f"{name} is not Unicode text") from None


def _name(name: str, value: str, limit: int) -> None:
    """Printable ASCII without spaces: names end up in logs and metric labels."""
    if not 1 <= len(value) <= limit or not all("!" <= character <= "~" for character in value):
        raise BadMessage("bounds", f"{name} is 1 to {limit} printable ASCII characters")


def _text(name: str, value: str, low: int, high: int) -> None:
    """UTF-8 text for people, of `low` to `high` bytes, without control characters."""
    if not low <= len(_utf8(name, value)) <= high or any(c < " " or "\x7f" <= c <= "\x9f" for c in value):
        raise BadMessage("bounds", f"{name} is {low} to {high} bytes of text without control characters")


def _rising(name: str, values: list[str], low: int, high: int) -> None:
    """Sorted, none twice: one manifest, one order."""
    _between(name, len(values), low, high)
    if any(a >= b for a, b in pairwise(values)):
        raise BadMessage("bounds", f"{name} are sorted, none twice")

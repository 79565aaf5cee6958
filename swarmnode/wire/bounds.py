"""Bounds of the values of decoded messages, as in protocol/02-rollouts.md. The decoder has already
checked the types.

The checks also run on a node's own messages before they are signed, so that a local bug does not
get the node rejected by the swarm.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from swarmnode.errors import BadMessage
from swarmnode.wire import limits
from swarmnode.wire.fields import (
    ANY_COUNTER,
    COUNTER,
    check_between,
    check_counter,
    check_fields,
    check_finite,
    check_length,
    check_name,
    check_positive,
    check_rising,
    check_text,
    utf8,
)
from swarmnode.wire.listings import (
    GroupResponse,
    GroupsRequest,
    GroupsResponse,
    ListedGroup,
    ListingRequest,
    ListingResponse,
)
from swarmnode.wire.messages import (
    BulkManifest,
    BulkManifestResponse,
    BulkRequest,
    BulkResponse,
    Completion,
    ManifestResponse,
    NeighboursRequest,
    NeighboursResponse,
    RolloutGroup,
    RolloutRules,
    SamplingParams,
    Session,
    Summary,
    SwarmManifest,
    TaskRef,
)
from swarmnode.wire.tensors import ITEM_BYTES, unpack_logprobs

_LENGTHS: Final = {
    **dict.fromkeys(("model", "tokenizer", "fingerprint"), limits.FINGERPRINT_BYTES),
    **dict.fromkeys(("key", "author", "founder"), limits.KEY_BYTES),
    "signature": limits.SIGNATURE_BYTES,
    "swarm": limits.SWARM_ID_BYTES,
    "content": limits.CONTENT_ID_BYTES,
    "transfer": limits.TRANSFER_BYTES,
    "root": limits.CHUNK_HASH_BYTES,
}
"""Number of bytes of the fields that have one length in all messages, by name."""
_COUNTERS: Final = (
    *("policy_version", "created_at", "started_at", "issued_at", "sequence", "seed", "position"),
    *("used", "uptime", "step", "reward_step", "published"),
)
_RANGES: Final = dict.fromkeys(_COUNTERS, ANY_COUNTER)


def check_message(message: Any) -> None:  # noqa: ANN401
    """Raise BadMessage("bounds") or BadMessage("not_finite") if a value of `message` is not
    allowed."""
    check_fields(message, _LENGTHS, _RANGES)
    if type(message) in _CHECKS:
        _CHECKS[type(message)](message)


def _check_group(group: RolloutGroup) -> None:
    _check_task(group.task)
    _check_sampling(group.sampling)
    check_between("completions", len(group.completions), limits.MIN_COMPLETIONS, limits.COMPLETIONS)
    for completion in group.completions:
        _check_completion(completion, group.sampling.max_tokens)


def _check_task(task: TaskRef) -> None:
    check_name("task.id", task.id, limits.TASK_ID_BYTES)
    check_name("task.version", task.version, limits.VERSION_BYTES)
    check_fields(task, _LENGTHS, _RANGES)
    if task.seed % 2**limits.INDEX_BITS:
        raise BadMessage("bounds", "task.seed is not the start of a block")
    check_between("task.index", task.index, 0, 2**limits.INDEX_BITS - 1)


def _check_sampling(sampling: SamplingParams) -> None:
    check_positive("sampling.temperature", sampling.temperature, limits.TEMPERATURE)
    check_positive("sampling.top_p", sampling.top_p, 1)
    check_between("sampling.max_tokens", sampling.max_tokens, 1, limits.TOKENS)


def _check_completion(completion: Completion, max_tokens: int) -> None:
    if len(utf8("text", completion.text)) > limits.TEXT_BYTES:
        raise BadMessage("bounds", "text is too long")
    most = limits.TOKENS if completion.turns else max_tokens
    check_between("tokens", completion.tokens, 1, most)
    if completion.turns:
        _check_turns(completion, max_tokens)
    check_finite("logprob", completion.logprob)
    if not limits.TOKEN_LOGPROB * completion.tokens <= completion.logprob <= 0:
        raise BadMessage("bounds", "logprob")
    for name in ("token_ids", "logprobs"):
        packed = getattr(completion, name)
        if packed and len(packed) != ITEM_BYTES * completion.tokens:
            raise BadMessage("bounds", f"{name} does not have one item per token")
    if completion.logprobs:
        import numpy as np

        logprobs = unpack_logprobs(completion.logprobs)  # (tokens,)
        if not np.isfinite(logprobs).all():
            raise BadMessage("not_finite", "logprobs")
        if logprobs.max() > limits.LOGPROB_SLACK or logprobs.min() < limits.TOKEN_LOGPROB:
            raise BadMessage("bounds", "logprobs")


def _check_turns(completion: Completion, max_tokens: int) -> None:
    """Check that the turns divide text and tokens into whole actions without a remainder."""
    check_between("turns", len(completion.turns), 0, limits.TURNS)
    text, end = completion.text.encode(), 0
    for turn in completion.turns:
        check_between("turn.text_bytes", turn.text_bytes, 0, limits.TEXT_BYTES)
        check_between("turn.tokens", turn.tokens, 1, max_tokens)
        end += turn.text_bytes
        if end < len(text) and text[end] & 0xC0 == 0x80:  # a continuation byte of UTF-8
            raise BadMessage("bounds", "a turn ends within a character")
    if end != len(text):
        raise BadMessage("bounds", "the turns are not as long as the text")
    if sum(turn.tokens for turn in completion.turns) != completion.tokens:
        raise BadMessage("bounds", "the turns do not have the tokens of the completion")


def _check_listing_request(request: ListingRequest) -> None:
    check_length("life", request.life, limits.LIFE_BYTES if request.life else 0)
    check_between("position", request.position, 0, COUNTER if request.life else 0)
    check_between("patience", request.patience, 0, limits.PATIENCE_SECONDS)


def _check_listing_response(response: ListingResponse) -> None:
    check_length("life", response.life, limits.LIFE_BYTES)
    check_between(
        "groups", len(response.groups), 0, limits.LISTED if response.status == "ok" else 0
    )
    for listed in response.groups:
        _check_listed(listed)
    if len({listed.content for listed in response.groups}) < len(response.groups):
        raise BadMessage("bounds", "a group is listed twice")


def _check_listed(listed: ListedGroup) -> None:
    check_fields(listed, _LENGTHS, _RANGES)
    check_name("task", listed.task, limits.TASK_ID_BYTES)
    check_between("size", listed.size, 1, limits.GROUP_BYTES)
    check_between("spread", listed.spread, 0.0, limits.SPREAD)


def _check_groups_request(request: GroupsRequest) -> None:
    check_between("contents", len(request.contents), 1, limits.PULLED)
    for content in request.contents:
        check_length("content", content, limits.CONTENT_ID_BYTES)
    if len(set(request.contents)) < len(request.contents):
        raise BadMessage("bounds", "a group is asked for twice")


def _check_group_response(response: GroupResponse) -> None:
    if bool(response.body) != (response.status == "ok"):
        raise BadMessage("bounds", "a body comes with `ok` and only with it")
    check_between("body", len(response.body), 0, limits.GROUP_BYTES)


def _check_groups_response(response: GroupsResponse) -> None:
    check_between("groups", len(response.groups), 1, limits.PULLED)
    for group in response.groups:
        _check_group_response(group)
    check_between(
        "groups", sum(len(group.body) for group in response.groups), 0, limits.GROUP_BYTES
    )


def _check_neighbours_request(request: NeighboursRequest) -> None:
    _check_addresses(request.addresses)
    check_between("session", len(request.session), 0, limits.SIGNED_SESSION_BYTES)
    check_between("summary", len(request.summary), 0, limits.SUMMARY_BYTES)


def _check_neighbours_response(response: NeighboursResponse) -> None:
    check_between("peers", len(response.peers), 0, limits.PEERS)
    for peer in response.peers:
        check_name("peer", peer.peer, limits.PEER_ID_BYTES)
        _check_addresses(peer.addresses)
    check_between("sessions", len(response.sessions), 0, limits.SESSIONS)
    for session in response.sessions:
        check_between("session", len(session), 1, limits.SIGNED_SESSION_BYTES)
    check_between("summaries", len(response.summaries), 0, limits.SUMMARIES)
    for summary in response.summaries:
        check_between("summary", len(summary), 1, limits.SUMMARY_BYTES)
    if response.successor:
        check_length("successor", response.successor, limits.SWARM_ID_BYTES)


def _check_addresses(addresses: list[str]) -> None:
    check_between("addresses", len(addresses), 0, limits.PEER_ADDRESSES)
    for address in addresses:
        check_name("address", address, limits.ADDRESS_BYTES)


def _check_manifest(manifest: SwarmManifest) -> None:
    check_text("name", manifest.name, 1, limits.MANIFEST_NAME_BYTES)
    if manifest.predecessor:
        check_length("predecessor", manifest.predecessor, limits.SWARM_ID_BYTES)
    check_name("minimum_version", manifest.minimum_version, limits.MINIMUM_VERSION_BYTES)
    check_rising("protocols", manifest.protocols, 1, limits.PROTOCOL_IDS)
    for protocol in manifest.protocols:
        check_name("protocol", protocol, limits.PROTOCOL_BYTES)
    check_between("models", len(manifest.models), 0, limits.MODELS)
    for model in manifest.models:
        check_name("models.name", model.name, limits.MODEL_NAME_BYTES)
        if model.revision:
            check_name("models.revision", model.revision, limits.REVISION_BYTES)
        check_fields(model, _LENGTHS, _RANGES)
    check_rising("tasks", [task.id for task in manifest.tasks], 1, limits.TASKS)
    for task in manifest.tasks:
        check_name("tasks.id", task.id, limits.TASK_ID_BYTES)
        check_name("tasks.version", task.version, limits.VERSION_BYTES)
        check_text("tasks.settings", task.settings, 0, limits.SETTING_VALUE_BYTES)
    _check_rules(manifest.rollouts)
    check_rising("settings", [setting.key for setting in manifest.settings], 0, limits.SETTINGS)
    for setting in manifest.settings:
        check_name("settings.key", setting.key, limits.SETTING_KEY_BYTES)
        check_text("settings.value", setting.value, 1, limits.SETTING_VALUE_BYTES)
    check_between("bootstrap", len(manifest.bootstrap), 0, limits.BOOTSTRAP_ADDRESSES)
    for address in manifest.bootstrap:
        check_name("bootstrap", address, limits.ADDRESS_BYTES)
    check_rising("members", manifest.access.members, 0, limits.MEMBERS)
    for member in manifest.access.members:
        check_name("members", member, limits.PEER_ID_BYTES)
    if manifest.access.secret:
        check_length("secret", manifest.access.secret, limits.SECRET_BYTES)


def _check_rules(rules: RolloutRules) -> None:
    check_between(
        "min_completions", rules.min_completions, limits.MIN_COMPLETIONS, limits.COMPLETIONS
    )
    check_between(
        "max_completions", rules.max_completions, rules.min_completions, limits.COMPLETIONS
    )
    _check_sampling(SamplingParams(rules.temperature, rules.top_p, rules.max_tokens))
    check_positive("groups_per_second", rules.groups_per_second, limits.GROUPS_PER_SECOND)


def _check_manifest_response(response: ManifestResponse) -> None:
    check_between("manifest", len(response.manifest), 0, limits.MANIFEST_BYTES)
    check_between(
        "successor", len(response.successor), 0, limits.MANIFEST_BYTES if response.manifest else 0
    )


def _check_session(session: Session) -> None:
    check_length("id", session.id, limits.SESSION_BYTES)


def _check_summary(summary: Summary) -> None:
    check_text("name", summary.name, 0, limits.SUMMARY_NAME_BYTES)
    check_name("version", summary.version, limits.MINIMUM_VERSION_BYTES)
    check_counter("peers", summary.peers)
    check_finite("reward", summary.reward)
    if summary.reward != -1 and not 0 <= summary.reward <= 1:
        raise BadMessage("bounds", "reward is 0 to 1, or -1")


def _check_bulk_manifest(manifest: BulkManifest) -> None:
    check_between(
        "chunk_bytes", manifest.chunk_bytes, limits.BULK_MIN_CHUNK_BYTES, limits.BULK_CHUNK_BYTES
    )
    check_between("size", manifest.size, 1, limits.BULK_CHUNKS * manifest.chunk_bytes)
    check_length(
        "hashes",
        manifest.hashes,
        -(-manifest.size // manifest.chunk_bytes) * limits.CHUNK_HASH_BYTES,
    )


def _check_bulk_manifest_response(response: BulkManifestResponse) -> None:
    if bool(response.manifest) != (response.status == "ok"):
        raise BadMessage("bounds", "a manifest comes with `ok` and only with it")
    check_between("manifest", len(response.manifest), 0, limits.BULK_MANIFEST_BYTES)


def _check_bulk_request(request: BulkRequest) -> None:
    check_between("wanted", len(request.wanted), 1, limits.BULK_CHUNKS // 8)
    if not any(request.wanted):
        raise BadMessage("bounds", "nothing is wanted")


def _check_bulk_response(response: BulkResponse) -> None:
    low, high = (
        (1, limits.BULK_CHUNKS * limits.BULK_CHUNK_BYTES) if response.status == "ok" else (0, 0)
    )
    check_between("size", response.size, low, high)


_CHECKS: dict[type, Callable[[Any], None]] = {
    RolloutGroup: _check_group,
    ListingRequest: _check_listing_request,
    ListingResponse: _check_listing_response,
    GroupsRequest: _check_groups_request,
    GroupsResponse: _check_groups_response,
    NeighboursRequest: _check_neighbours_request,
    NeighboursResponse: _check_neighbours_response,
    SwarmManifest: _check_manifest,
    ManifestResponse: _check_manifest_response,
    Session: _check_session,
    Summary: _check_summary,
    BulkManifest: _check_bulk_manifest,
    BulkManifestResponse: _check_bulk_manifest_response,
    BulkRequest: _check_bulk_request,
    BulkResponse: _check_bulk_response,
}

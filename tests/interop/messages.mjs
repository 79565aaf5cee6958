// Messages of 00 to 02: shapes, bounds, signatures, and values derived from a key, a swarm and a number.
import crypto from 'node:crypto'
import fs from 'node:fs'
import { blake2b } from '@noble/hashes/blake2.js'
import { base58btc } from 'multiformats/bases/base58'
import { parse } from 'smol-toml'
import { check, choice, decode, encode, Refused, row, tagged } from './msgpack.mjs'
import { decompress } from './zstd.mjs'

export const REGISTRY = parse(fs.readFileSync(new URL('../../protocol/registry.toml', import.meta.url), 'utf8'))
const { bytes: BYTES, exact_bytes: EXACT, counts: COUNTS, floats: FLOATS } = REGISTRY
export const DOMAINS = Object.fromEntries(Object.entries(REGISTRY.domains).map(([name, text]) => [name, Buffer.from(text, 'ascii')]))

export const hash = (data, length = 32) => blake2b(data, { dkLen: length })
export const hex = (data) => Buffer.from(data).toString('hex')
export const equal = (a, b) => Buffer.compare(a, b) === 0
const u64be = (value) => {
  const bytes = Buffer.alloc(8)
  bytes.writeBigUInt64BE(BigInt(value))
  return bytes
}
const sizeOf = (text) => Buffer.byteLength(text, 'utf8')
const byBytes = (a, b) => Buffer.compare(Buffer.from(a), Buffer.from(b))

// ---- shapes ------------------------------------------------------------------------------------------------------------

export const ENVELOPE = { key: 'bin', payload: 'bin', signature: 'bin', codec: choice('raw', 'zstd') }
const TASK = { id: 'str', version: 'str', seed: 'int', index: 'int', difficulty: 'int' }
const SAMPLING = { temperature: 'float', top_p: 'float', max_tokens: 'int' }
const TURN = row({ text_bytes: 'int', tokens: 'int' })
const COMPLETION = {
  text: 'str', tokens: 'int', logprob: 'float', finish: choice('eos', 'length'), token_ids: 'bin', logprobs: 'bin', turns: [TURN]
}
export const GROUP = tagged({
  rollout: {
    task: TASK, model: 'bin', tokenizer: 'bin', policy_version: 'int', created_at: 'int', sequence: 'int', sampling: SAMPLING,
    completions: [COMPLETION]
  }
})
const ANSWER = { status: choice('ok', 'unknown', 'busy'), body: 'bin' }
const LISTED = row({ content: 'bin', author: 'bin', task: 'str', created_at: 'int', size: 'int', spread: 'float' })
export const MANIFEST = {
  name: 'str', founder: 'bin', created_at: 'int', predecessor: 'bin', minimum_version: 'str', protocols: ['str'],
  models: [{ name: 'str', revision: 'str', fingerprint: 'bin', tokenizer: 'bin' }],
  tasks: [{ id: 'str', version: 'str', settings: 'str' }],
  rollouts: {
    min_completions: 'int', max_completions: 'int', max_tokens: 'int', temperature: 'float', top_p: 'float', groups_per_second: 'float'
  },
  settings: [{ key: 'str', value: 'str' }],
  bootstrap: ['str'],
  access: { members: ['str'], secret: 'bin' }
}
export const SESSION = { session: 'bin', started_at: 'int', issued_at: 'int' }
export const SUMMARY = {
  name: 'str', version: 'str', created_at: 'int', uptime: 'int', step: 'int', policy_version: 'int', reward: 'float', published: 'int',
  peers: 'int'
}

// ---- bounds ------------------------------------------------------------------------------------------------------------

const length = (value, exact) => check(value.length === exact)
const finite = (...values) => check(values.every(Number.isFinite), 'not_finite')
const counter = (...values) => check(values.every((value) => value >= 0n && value < 1n << BigInt(COUNTS.integer_bits)))
const name = (value, most) => check(value.length >= 1 && value.length <= most && /^[!-~]*$/.test(value))
const text = (value, least, most) => check(sizeOf(value) >= least && sizeOf(value) <= most && !/[\u0000-\u001f\u007f-\u009f]/.test(value))
const many = (items, least, most, each) => {
  check(items.length >= least && items.length <= most)
  items.forEach(each)
}
const sorted = (keys) => check(keys.every((key, i) => i === 0 || byBytes(keys[i - 1], key) < 0))

function checkSampling ({ temperature, top_p: topP, max_tokens: most }) {
  finite(temperature, topP)
  check(temperature > 0 && temperature <= FLOATS.temperature && topP > 0 && topP <= 1 && most >= 1n && most <= BigInt(COUNTS.tokens))
}

export const packedFloats = (packed) => {
  const view = new DataView(packed.buffer, packed.byteOffset, packed.byteLength)
  return Array.from({ length: packed.length / 4 }, (_, i) => view.getFloat32(4 * i, true))
}

// The turns of an episode divide text and tokens into whole actions. most: maximum tokens of one action.
function checkTurns ({ text, tokens, turns }, most) {
  check(turns.length <= COUNTS.turns)
  if (turns.length === 0) return
  const bytes = Buffer.from(text)
  let [end, sampled] = [0n, 0n]
  for (const turn of turns) {
    check(turn.text_bytes >= 0n && turn.tokens >= 1n && turn.tokens <= most)
    end += turn.text_bytes
    sampled += turn.tokens
    check(end >= BigInt(bytes.length) || (bytes[Number(end)] & 0xc0) !== 0x80) // within a character
  }
  check(end === BigInt(bytes.length) && sampled === tokens)
}

function checkCompletion (completion, most) {
  const { text, tokens, logprob, token_ids: ids, logprobs, turns } = completion
  check(sizeOf(text) <= BYTES.text && tokens >= 1n && tokens <= (turns.length ? BigInt(COUNTS.tokens) : most))
  checkTurns(completion, most)
  finite(logprob)
  check(logprob <= 0 && logprob >= FLOATS.token_logprob * Number(tokens))
  for (const packed of [ids, logprobs]) check(packed.length === 0 || packed.length === 4 * Number(tokens))
  const each = packedFloats(logprobs)
  finite(...each)
  check(each.every((one) => one >= FLOATS.token_logprob && one <= FLOATS.logprob_slack))
}

function checkGroup ({ task, model, tokenizer, policy_version: version, created_at: created, sequence, sampling, completions }) {
  name(task.id, BYTES.task_id)
  name(task.version, BYTES.task_version)
  counter(task.seed, version, created, sequence)
  const items = 1n << BigInt(COUNTS.index_bits)
  check(task.seed % items === 0n && task.index >= 0n && task.index < items)
  check(task.difficulty >= 0n && task.difficulty <= BigInt(COUNTS.difficulty))
  length(model, EXACT.fingerprint)
  length(tokenizer, EXACT.fingerprint)
  checkSampling(sampling)
  many(completions, COUNTS.min_completions, COUNTS.max_completions, (completion) => checkCompletion(completion, sampling.max_tokens))
}

const checkAnswer = ({ status, body }) => check((status === 'ok') === (body.length > 0) && body.length <= BYTES.group)

function checkListed ({ content, author, task, created_at: created, size, spread }) {
  length(content, EXACT.content_id)
  length(author, EXACT.key)
  name(task, BYTES.task_id)
  counter(created)
  check(size >= 1n && size <= BigInt(BYTES.group))
  finite(spread)
  check(spread >= 0 && spread <= FLOATS.spread)
}

function checkManifest (manifest) {
  const { models, tasks, rollouts, settings, access } = manifest
  text(manifest.name, 1, BYTES.manifest_name)
  length(manifest.founder, EXACT.key)
  counter(manifest.created_at)
  check([0, EXACT.swarm_id].includes(manifest.predecessor.length))
  name(manifest.minimum_version, BYTES.minimum_version)
  many(manifest.protocols, 1, COUNTS.protocols, (protocol) => name(protocol, BYTES.protocol))
  sorted(manifest.protocols)
  many(models, 0, COUNTS.models, (model) => {
    name(model.name, BYTES.model_name)
    if (model.revision) name(model.revision, BYTES.revision)
    length(model.fingerprint, EXACT.fingerprint)
    length(model.tokenizer, EXACT.fingerprint)
  })
  many(tasks, 1, COUNTS.tasks, (task) => {
    name(task.id, BYTES.task_id)
    name(task.version, BYTES.task_version)
    text(task.settings, 0, BYTES.setting_value)
  })
  sorted(tasks.map((task) => task.id))
  const [least, most] = [rollouts.min_completions, rollouts.max_completions]
  check(least >= BigInt(COUNTS.min_completions) && least <= most && most <= BigInt(COUNTS.max_completions))
  checkSampling(rollouts)
  finite(rollouts.groups_per_second)
  check(rollouts.groups_per_second > 0 && rollouts.groups_per_second <= FLOATS.groups_per_second)
  many(settings, 0, COUNTS.settings, ({ key, value }) => {
    name(key, BYTES.setting_key)
    text(value, 1, BYTES.setting_value)
  })
  sorted(settings.map((setting) => setting.key))
  many(manifest.bootstrap, 0, COUNTS.bootstrap, (address) => name(address, BYTES.address))
  many(access.members, 0, COUNTS.members, (member) => name(member, BYTES.peer_id))
  sorted(access.members)
  check([0, EXACT.secret].includes(access.secret.length))
}

function checkSummary (summary) {
  text(summary.name, 0, BYTES.summary_name)
  name(summary.version, 32)
  counter(summary.created_at, summary.uptime, summary.step, summary.policy_version, summary.published, summary.peers)
  finite(summary.reward)
  check(summary.reward === -1 || (summary.reward >= 0 && summary.reward <= 1))
}

function checkSession ({ session, started_at: started, issued_at: issued }) {
  length(session, EXACT.session)
  counter(started, issued)
}

const addresses = (all) => many(all, 0, COUNTS.peer_addresses, (address) => name(address, BYTES.address))

// ---- requests and responses --------------------------------------------------------------------------------------------

// Name in protocol/schema → its shape and further checks. The cap has the same name in the registry.
export const MESSAGES = {
  listing_request: [{ swarm: 'bin', life: 'bin', position: 'int', patience: 'int' }, ({ swarm, life, position, patience }) => {
    length(swarm, EXACT.swarm_id)
    check([0, EXACT.life].includes(life.length))
    counter(position)
    check(life.length > 0 || position === 0n)
    check(patience >= 0n && patience <= BigInt(REGISTRY.seconds.patience))
  }],
  listing_response: [{ status: choice('ok', 'busy', 'unknown'), life: 'bin', position: 'int', groups: [LISTED] }, ({ status, life, position, groups }) => {
    length(life, EXACT.life)
    counter(position)
    many(groups, 0, COUNTS.listed, checkListed)
    check(groups.length === 0 || status === 'ok')
    check(new Set(groups.map((group) => hex(group.content))).size === groups.length)
  }],
  groups_request: [{ contents: ['bin'] }, ({ contents }) => {
    many(contents, 1, COUNTS.pulled, (content) => length(content, EXACT.content_id))
    check(new Set(contents.map(hex)).size === contents.length)
  }],
  groups_response: [{ groups: [ANSWER] }, ({ groups }) => {
    many(groups, 1, COUNTS.pulled, checkAnswer)
    check(groups.reduce((sum, group) => sum + group.body.length, 0) <= BYTES.group)
  }],
  peers_request: [{ swarm: 'bin', addresses: ['str'] }, (message) => {
    length(message.swarm, EXACT.swarm_id)
    addresses(message.addresses)
  }],
  peers_response: [{ swarm: 'bin', peers: [{ peer: 'str', addresses: ['str'] }] }, ({ swarm, peers }) => {
    length(swarm, EXACT.swarm_id)
    many(peers, 0, COUNTS.peers, (one) => {
      name(one.peer, BYTES.peer_id)
      addresses(one.addresses)
    })
  }],
  manifest_request: [{ swarm: 'bin' }, ({ swarm }) => length(swarm, EXACT.swarm_id)],
  manifest_response: [{ manifest: 'bin', successor: 'bin' }, ({ manifest, successor }) => {
    check(manifest.length <= BYTES.manifest && successor.length <= (manifest.length ? BYTES.manifest : 0))
  }],
  session_response: [{ sessions: ['bin'] }, ({ sessions }) => {
    many(sessions, 0, COUNTS.sessions, (session) => check(session.length >= 1 && session.length <= BYTES.session_request))
  }],
  summary_request: [{ summary: 'bin' }, ({ summary }) => check(summary.length <= BYTES.summary)],
  summary_response: [{ summaries: ['bin'] }, ({ summaries }) => {
    many(summaries, 0, COUNTS.summaries, (summary) => check(summary.length >= 1 && summary.length <= BYTES.summary))
  }]
}

export function read (kind, frame) {
  const [shape, checked] = MESSAGES[kind]
  const message = decode(frame, BYTES[kind], shape)
  checked(message)
  return message
}

export const write = (kind, message) => encode(MESSAGES[kind][0], message)

// ---- keys and envelopes ------------------------------------------------------------------------------------------------

const PEER_ID = Buffer.from('002408011220', 'hex')
export const peerOf = (key) => base58btc.baseEncode(Buffer.concat([PEER_ID, key]))
export const contentOf = (frame) => hash(frame)

const signedBytes = (domain, swarm, codec, payload) => Buffer.concat([Buffer.from([domain.length]), domain, swarm, Buffer.from([codec === 'zstd' ? 1 : 0]), payload])
const base64url = (data) => Buffer.from(data).toString('base64url')
export const signingKey = (seed, key) => crypto.createPrivateKey({ key: { kty: 'OKP', crv: 'Ed25519', d: base64url(seed), x: base64url(key) }, format: 'jwk' })

// signer: {key: 32 bytes, sign: an Ed25519 private key}.
export function seal (signer, domain, swarm, payload, codec = 'raw') {
  const signature = crypto.sign(null, signedBytes(domain, swarm, codec, payload), signer.sign)
  return encode(ENVELOPE, { key: signer.key, payload, signature, codec })
}

export function openEnvelope (frame, limit) {
  const envelope = decode(frame, limit, ENVELOPE)
  length(envelope.key, EXACT.key)
  length(envelope.signature, EXACT.signature)
  return envelope
}

const SMALL_ORDER = new Set(REGISTRY.small_order_keys)
const isSmallOrder = (key) => SMALL_ORDER.has(hex([...key.subarray(0, 31), key[31] & 0x7f]))

export function verify (envelope, domain, swarm) {
  check(!isSmallOrder(envelope.key), 'signature')
  let valid = false
  try {
    const key = crypto.createPublicKey({ key: { kty: 'OKP', crv: 'Ed25519', x: base64url(envelope.key) }, format: 'jwk' })
    valid = crypto.verify(null, signedBytes(domain, swarm, envelope.codec, envelope.payload), key, envelope.signature)
  } catch {} // the key is not a curve point
  check(valid, 'signature')
}

// The group in a frame: 02, sections 5.1 and 5.2, without the rules that need state or a clock.
export function openGroup (frame, domain, swarm) {
  const envelope = openEnvelope(frame, BYTES.group)
  verify(envelope, domain, swarm)
  return { peer: peerOf(envelope.key), content: contentOf(frame), codec: envelope.codec, group: groupOf(envelope) }
}

export function groupOf (envelope) {
  const payload = envelope.codec === 'zstd' ? decompress(envelope.payload, BYTES.group, BYTES.zstd_window) : envelope.payload
  const group = decode(payload, BYTES.group, GROUP)
  checkGroup(group)
  return group
}

function openRaw (frame, limit, domain, swarm, shape, checked) {
  const envelope = openEnvelope(frame, limit)
  check(envelope.codec === 'raw', 'compression')
  verify(envelope, domain, swarm ?? manifestId(envelope.payload))
  const message = decode(envelope.payload, limit, shape)
  checked(message)
  return { envelope, message }
}

export const manifestId = (payload) => hash(Buffer.concat([DOMAINS.swarm_manifest, payload]))

export function openManifest (frame) {
  const { envelope, message } = openRaw(frame, BYTES.manifest, DOMAINS.manifest, null, MANIFEST, checkManifest)
  check(equal(message.founder, envelope.key), 'signature')
  return { swarm: manifestId(envelope.payload), manifest: message }
}

export function openSession (frame, swarm) {
  const { envelope, message } = openRaw(frame, BYTES.session_request, DOMAINS.session, swarm, SESSION, checkSession)
  return { peer: peerOf(envelope.key), session: message }
}

export function openSummary (frame, swarm) {
  const { envelope, message } = openRaw(frame, BYTES.summary, DOMAINS.summary, swarm, SUMMARY, checkSummary)
  return { peer: peerOf(envelope.key), summary: message }
}

// ---- derived values --------------------------------------------------------------------------------------------

export function swarmId (swarmName, tasks, protocols) { // tasks: id → version
  const ids = Object.keys(tasks).sort(byBytes)
  const described = row({ name: 'str', tasks: [row({ id: 'str', version: 'str' })], protocols: ['str'] })
  const value = { name: swarmName, tasks: ids.map((id) => ({ id, version: tasks[id] })), protocols: [...protocols].sort(byBytes) }
  return hash(Buffer.concat([DOMAINS.swarm, encode(described, value)]))
}

const INDEX_BITS = BigInt(COUNTS.index_bits)
const blockOf = (data) => (BigInt('0x' + hex(hash(data))) >> BigInt(256 - COUNTS.block_bits)) << INDEX_BITS

export function taskSeed (swarm, peer, sequence, task, difficulty) {
  const number = BigInt(sequence)
  const choice = [Buffer.from([Number(difficulty)]), Buffer.from(task)]
  const seed = blockOf(Buffer.concat([DOMAINS.seed, swarm, Buffer.from(peer), u64be(number >> INDEX_BITS), ...choice]))
  return { seed, index: number & ((1n << INDEX_BITS) - 1n) }
}

export const evaluationSeed = (task, block) => (1n << 62n) + blockOf(Buffer.concat([DOMAINS.evaluation, Buffer.from(task), Buffer.from([0]), u64be(block)]))

export function chooseTask (tasks, swarm, peer, sequence) {
  const ids = [...new Set(tasks)].sort(byBytes)
  const drawn = hash(Buffer.concat([DOMAINS.task, swarm, Buffer.from(peer), u64be(sequence)]), 8)
  return ids[Number(BigInt('0x' + hex(drawn)) % BigInt(ids.length))]
}

// Listed positions (02, section 4.1). held: [position, author, source] of each group; last: the latest position.
export function listedPositions ({ life, last, held, own, reader, request }) {
  const cursor = hex(life) === hex(request.life) && request.position <= last ? request.position : 0n
  const news = held.filter(([position, ...peers]) => position > cursor && !peers.includes(reader)).reverse()
  const chosen = news.filter(([, author]) => author === own).slice(0, COUNTS.listed / 2)
  const rest = news.filter((one) => !chosen.includes(one))
  for (let round = 0; chosen.length < Math.min(COUNTS.listed, news.length); round++) {
    const listed = (author) => chosen.filter((other) => other[1] === author).length
    for (const one of rest) {
      if (chosen.length < COUNTS.listed && !chosen.includes(one) && listed(one[1]) <= round) chosen.push(one)
    }
  }
  return chosen.map(([position]) => position).sort((a, b) => a < b ? -1 : 1)
}

// `mismatch` if a listing contradicts the envelope of its group, else null.
export function falselyListed (listed, frame, domain, swarm) {
  if (!equal(contentOf(frame), listed.content)) return 'mismatch'
  const { peer, group } = openGroup(frame, domain, swarm)
  const truly = peer === peerOf(listed.author) && group.task.id === listed.task && group.created_at === listed.created_at &&
    listed.size === BigInt(frame.length)
  return truly ? null : 'mismatch'
}

export { BYTES, Refused }

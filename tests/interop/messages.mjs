// Messages of 00 to 02 that a reading client needs: shapes, bounds, signatures, and values derived from a key, a swarm and a number.
import crypto from 'node:crypto'
import fs from 'node:fs'
import { blake2b } from '@noble/hashes/blake2.js'
import { base58btc } from 'multiformats/bases/base58'
import { parse } from 'smol-toml'
import { check, choice, decode, encode, row, tagged } from './msgpack.mjs'
import { decompress } from './zstd.mjs'

export const REGISTRY = parse(fs.readFileSync(new URL('../../protocol/registry.toml', import.meta.url), 'utf8'))
const { bytes: BYTES, counts: COUNTS, floats: FLOATS } = REGISTRY
export const DOMAINS = Object.fromEntries(Object.entries(REGISTRY.domains).map(([name, text]) => [name, Buffer.from(text, 'ascii')]))

export const hash = (data, length = 32) => blake2b(data, { dkLen: length })
export const hex = (data) => Buffer.from(data).toString('hex')
export const equal = (a, b) => Buffer.compare(a, b) === 0

// ---- shapes ------------------------------------------------------------------------------------------------------------

const ENVELOPE = { key: 'bin', payload: 'bin', signature: 'bin', codec: choice('raw', 'zstd') }
const GROUP = tagged({
  rollout: {
    task: { id: 'str', version: 'str', seed: 'int', index: 'int' },
    model: 'bin', tokenizer: 'bin', policy_version: 'int', created_at: 'int', sequence: 'int',
    sampling: { temperature: 'float', top_p: 'float', max_tokens: 'int' },
    completions: [{
      text: 'str', tokens: 'int', logprob: 'float', finish: choice('eos', 'length'), token_ids: 'bin', logprobs: 'bin',
      turns: [row({ text_bytes: 'int', tokens: 'int' })]
    }]
  }
})
const MANIFEST = {
  name: 'str', founder: 'bin', created_at: 'int', predecessor: 'bin', minimum_version: 'str', protocols: ['str'],
  models: [{ name: 'str', revision: 'str', fingerprint: 'bin', tokenizer: 'bin' }],
  tasks: [{ id: 'str', version: 'str', settings: 'str' }],
  rollouts: { min_completions: 'int', max_completions: 'int', max_tokens: 'int', temperature: 'float', top_p: 'float', groups_per_second: 'float' },
  settings: [{ key: 'str', value: 'str' }],
  bootstrap: ['str'],
  access: { members: ['str'], secret: 'bin' }
}

// ---- bounds ------------------------------------------------------------------------------------------------------------

const length = (value, exact) => check(value.length === exact)
const finite = (...values) => check(values.every(Number.isFinite), 'not_finite')
const counter = (...values) => check(values.every((value) => value >= 0n && value < 1n << BigInt(COUNTS.integer_bits)))
const name = (value, most) => check(value.length >= 1 && value.length <= most && /^[!-~]*$/.test(value))
const many = (items, least, most, each) => {
  check(items.length >= least && items.length <= most)
  items.forEach(each)
}

const packedFloats = (packed) => {
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
  check(Buffer.byteLength(text) <= BYTES.text && tokens >= 1n && tokens <= (turns.length ? BigInt(COUNTS.tokens) : most))
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
  name(task.version, BYTES.version)
  counter(task.seed, version, created, sequence)
  const items = 1n << BigInt(COUNTS.index_bits)
  check(task.seed % items === 0n && task.index >= 0n && task.index < items)
  length(model, BYTES.fingerprint)
  length(tokenizer, BYTES.fingerprint)
  const { temperature, top_p: topP, max_tokens: most } = sampling
  finite(temperature, topP)
  check(temperature > 0 && temperature <= FLOATS.temperature && topP > 0 && topP <= 1 && most >= 1n && most <= BigInt(COUNTS.tokens))
  many(completions, COUNTS.min_completions, COUNTS.completions, (completion) => checkCompletion(completion, most))
}

function checkListed ({ content, author, task, created_at: created, size, spread }) {
  length(content, BYTES.content_id)
  length(author, BYTES.key)
  name(task, BYTES.task_id)
  counter(created)
  check(size >= 1n && size <= BigInt(BYTES.group))
  finite(spread)
  check(spread >= 0 && spread <= FLOATS.spread)
}

// ---- requests and responses --------------------------------------------------------------------------------------------

// Shapes of the requests that the client sends. Keys here and below: of [protocols] in the registry.
const REQUESTS = {
  listing: { swarm: 'bin', life: 'bin', position: 'int', patience: 'int' }, groups: { contents: ['bin'] }, manifest: { swarm: 'bin' }
}

// Shapes of the responses, and further checks.
export const RESPONSES = {
  listing: [{
    status: choice('ok', 'busy', 'unknown'), life: 'bin', position: 'int',
    groups: [row({ content: 'bin', author: 'bin', task: 'str', created_at: 'int', size: 'int', spread: 'float' })]
  }, ({ status, life, position, groups }) => {
    length(life, BYTES.life)
    counter(position)
    many(groups, 0, COUNTS.listed, checkListed)
    check(groups.length === 0 || status === 'ok')
    check(new Set(groups.map((group) => hex(group.content))).size === groups.length)
  }],
  groups: [{ groups: [{ status: choice('ok', 'unknown', 'busy'), body: 'bin' }] }, ({ groups }) => {
    many(groups, 1, COUNTS.pulled, ({ status, body }) => check((status === 'ok') === (body.length > 0) && body.length <= BYTES.group))
    check(groups.reduce((sum, { body }) => sum + body.length, 0) <= BYTES.group)
  }],
  manifest: [{ manifest: 'bin', successor: 'bin' }, ({ manifest, successor }) => {
    check(manifest.length <= BYTES.manifest && successor.length <= (manifest.length ? BYTES.manifest : 0))
  }]
}

export const write = (name, request) => encode(REQUESTS[name], request)

export function read (name, frame) {
  const [shape, checked] = RESPONSES[name]
  const message = decode(frame, BYTES[`${name}_response`], shape)
  checked(message)
  return message
}

// ---- keys and envelopes ------------------------------------------------------------------------------------------------

const PEER_ID = Buffer.from('002408011220', 'hex')
const peerOf = (key) => base58btc.baseEncode(Buffer.concat([PEER_ID, key]))
const contentOf = (frame) => hash(frame)
const manifestId = (payload) => hash(Buffer.concat([DOMAINS.swarm_manifest, payload]))

function openEnvelope (frame, limit) {
  const envelope = decode(frame, limit, ENVELOPE)
  length(envelope.key, BYTES.key)
  length(envelope.signature, BYTES.signature)
  return envelope
}

const SMALL_ORDER = new Set(REGISTRY.small_order_keys)
const isSmallOrder = (key) => SMALL_ORDER.has(hex([...key.subarray(0, 31), key[31] & 0x7f]))

function verify ({ key, codec, payload, signature }, domain, swarm) {
  check(!isSmallOrder(key), 'signature')
  const signed = Buffer.concat([Buffer.from([domain.length]), domain, swarm, Buffer.from([codec === 'zstd' ? 1 : 0]), payload])
  let valid = false
  try {
    const point = crypto.createPublicKey({ key: { kty: 'OKP', crv: 'Ed25519', x: Buffer.from(key).toString('base64url') }, format: 'jwk' })
    valid = crypto.verify(null, signed, point, signature)
  } catch {} // the key is not a curve point
  check(valid, 'signature')
}

// The group in a frame: 02, sections 5.1 and 5.2, without the rules that need state or a clock.
export function openGroup (frame, domain, swarm) {
  const envelope = openEnvelope(frame, BYTES.group)
  verify(envelope, domain, swarm)
  const payload = envelope.codec === 'zstd' ? decompress(envelope.payload, BYTES.group, BYTES.zstd_window) : envelope.payload
  const group = decode(payload, BYTES.group, GROUP)
  checkGroup(group)
  return { peer: peerOf(envelope.key), content: contentOf(frame), codec: envelope.codec, group }
}

// The manifest that an invite names: its hash is the swarm id, so its founder's bounds are taken as they are.
export function openManifest (frame) {
  const envelope = openEnvelope(frame, BYTES.manifest)
  check(envelope.codec === 'raw', 'compression')
  verify(envelope, DOMAINS.manifest, manifestId(envelope.payload))
  const manifest = decode(envelope.payload, BYTES.manifest, MANIFEST)
  check(equal(manifest.founder, envelope.key), 'signature')
  return { swarm: manifestId(envelope.payload), manifest }
}

// ---- derived values --------------------------------------------------------------------------------------------

const INDEX_BITS = BigInt(COUNTS.index_bits)

export function taskSeed (swarm, peer, sequence, task) {
  const number = Buffer.from((sequence >> INDEX_BITS).toString(16).padStart(16, '0'), 'hex') // u64be
  const data = [DOMAINS.seed, swarm, Buffer.from(peer), number, Buffer.from(task)]
  const block = BigInt('0x' + hex(hash(Buffer.concat(data)))) >> BigInt(256 - COUNTS.block_bits)
  return { seed: block << INDEX_BITS, index: sequence & ((1n << INDEX_BITS) - 1n) }
}

// The group in a frame that a listing names.
export function openListed (listed, frame, domain, swarm) {
  check(equal(contentOf(frame), listed.content), 'mismatch')
  const opened = openGroup(frame, domain, swarm)
  const { peer, group } = opened
  check(peer === peerOf(listed.author) && group.task.id === listed.task, 'mismatch')
  check(group.created_at === listed.created_at && listed.size === BigInt(frame.length), 'mismatch')
  return opened
}

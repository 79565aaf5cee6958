// Frames with exactly one fault each, built like the vectors of the same name: `vectors file/name` → (member, group) → frame.
import { DOMAINS, ENVELOPE, GROUP, hash, MESSAGES, peerOf, REGISTRY, seal, taskSeed, write } from './messages.mjs'
import { decode, encode, tagged } from './msgpack.mjs'
import { store } from './zstd.mjs'

const bytes = (...parts) => new Uint8Array(Buffer.concat(parts.map((part) => typeof part === 'number' ? Buffer.from([part]) : Buffer.from(part))))
const swap = (data, from, to) => {
  const at = Buffer.from(data).indexOf(from)
  if (at < 0) throw new Error('what is replaced is not there')
  return bytes(data.subarray(0, at), to, data.subarray(at + from.length))
}
const opened = (frame) => decode(frame, frame.length, ENVELOPE)
const str = (text) => encode('str', text)

const sealed = (member, payload, codec) => seal(member.node.signer, DOMAINS.rollout, member.swarm, payload, codec)
// A signed group with one field changed.
const changed = (change) => (member, group) => {
  change(group, member)
  return member.sign(group)
}
// A group with another task and the seed of that task.
const asked = (change) => changed((group, member) => {
  change(group.task)
  Object.assign(group.task, taskSeed(member.swarm, member.node.peer, group.sequence, group.task.id, group.task.difficulty))
})
const turn = (length, tokens) => ({ text_bytes: BigInt(length), tokens: BigInt(tokens) })
const first = (change) => changed((group) => change(group.completions[0]))
// Changed bytes of the payload or of the envelope.
const payload = (alter, codec) => (member, group) => sealed(member, alter(encode(GROUP, group)), codec)
const envelope = (alter) => (member, group) => alter(member.sign(group), member)
const resigned = (alter) => envelope((frame, member) => encode(ENVELOPE, alter(opened(frame), member)))

const ORDER = (1n << 252n) + 27742317777372353535851937790883648493n
const littleEndian = (data) => BigInt('0x' + Buffer.from(data).reverse().toString('hex'))

export const FAULTS = {
  'envelopes/last byte missing': envelope((frame) => frame.subarray(0, -1)),
  'envelopes/trailing byte': envelope((frame) => bytes(frame, 0)),
  'envelopes/duplicate key': envelope((frame) => bytes(0x85, frame.subarray(1), str('codec'), str('raw'))),
  'envelopes/map header longer than needed': envelope((frame) => bytes([0xde, 0, 4], frame.subarray(1))),
  'envelopes/unknown field': envelope((frame) => bytes(0x85, frame.subarray(1), str('extra'), 1)),
  'envelopes/unknown codec': envelope((frame) => bytes(frame.subarray(0, -4), str('lz4'))),
  'envelopes/signature of 63 bytes': resigned((signed) => ({ ...signed, signature: signed.signature.subarray(0, 63) })),
  'envelopes/one bit of the signature flipped': resigned((signed) => ({ ...signed, signature: signed.signature.map((byte, i) => i ? byte : byte ^ 1) })),
  'envelopes/another swarm': (member, group) => seal(member.node.signer, DOMAINS.rollout, new Uint8Array(32), encode(GROUP, group)),
  'envelopes/codec flipped by a holder': resigned((signed) => ({ ...signed, codec: 'zstd' })),
  'envelopes/scalar beyond the group order': resigned((signed) => {
    const beyond = (littleEndian(signed.signature.subarray(32)) + ORDER).toString(16).padStart(64, '0')
    return { ...signed, signature: bytes(signed.signature.subarray(0, 32), Buffer.from(beyond, 'hex').reverse()) }
  }),
  'compression/size not declared': payload((data) => {
    const frame = store(data)
    return bytes(frame.subarray(0, 4), [0, 0], frame.subarray(9)) // multiple segments, no size, a window of 1 KiB
  }, 'zstd'),
  'compression/declares one byte more than a group may have': payload((data) => {
    const frame = Buffer.from(store(data))
    frame.writeUInt32LE(REGISTRY.bytes.group + 1, 5)
    return new Uint8Array(frame)
  }, 'zstd'),
  'compression/declares one byte too many': payload((data) => {
    const frame = Buffer.from(store(data))
    frame.writeUInt32LE(data.length + 1, 5)
    return new Uint8Array(frame)
  }, 'zstd'),
  'compression/trailing byte': payload((data) => bytes(store(data), 0), 'zstd'),
  'payloads/payload truncated': payload((data) => data.subarray(0, -1)),
  'payloads/integer where a float belongs': payload((data) => swap(data, bytes(str('top_p'), encode('float', 1)), bytes(str('top_p'), 1))),
  'payloads/fields in another order': (member, { type, ...group }) => {
    const turned = Object.fromEntries(Object.entries(GROUP.tagged.rollout).reverse())
    return sealed(member, encode(tagged({ rollout: turned }), { type, ...group }))
  },
  'payloads/unknown tag': payload((data) => swap(data, str('rollout'), str('rollou2'))),
  'payloads/text is nil': (member, group) => {
    group.completions[0].text = 'x'
    return payload((data) => swap(data, bytes(str('text'), str('x')), bytes(str('text'), 0xc0)))(member, group)
  },
  'payloads/unknown field': payload((data) => bytes(data[0] + 1, data.subarray(1), str('reward'), encode('float', 1))),
  'payloads/temperature is NaN': changed((group) => { group.sampling.temperature = NaN }),
  'payloads/completions: 1 items': changed((group) => { group.completions.length = 1 }),
  'payloads/sampling.temperature: 0.0': changed((group) => { group.sampling.temperature = 0 }),
  'payloads/completions.0.logprob: 0.5': first((completion) => { completion.logprob = 0.5 }),
  'payloads/33 turns': first((completion) => Object.assign(completion, { text: '', tokens: 33n, logprob: -1, turns: Array(33).fill(turn(0, 1)) })),
  'payloads/a turn that ends within a character': first((completion) => Object.assign(completion, {
    text: '≤', tokens: 3n, logprob: -1, turns: [turn(1, 1), turn(2, 2)]
  })),
  'payloads/turns with more tokens than the completion': first((completion) => {
    completion.turns = [turn(Buffer.byteLength(completion.text), completion.tokens + 1n)]
  }),
  'admission/episodes of a task of one turn': first((completion) => {
    completion.turns = [turn(Buffer.byteLength(completion.text), completion.tokens)]
  }),
  'admission/an hour and a second old': changed((group) => { group.created_at -= 3_610_000n }),
  'admission/two minutes and a second ahead': changed((group) => { group.created_at += 130_000n }),
  'admission/another sequence': changed((group) => { group.sequence += 1n }),
  'admission/the seed of another peer': changed((group, member) => {
    Object.assign(group.task, taskSeed(member.swarm, peerOf(new Uint8Array(32)), group.sequence, group.task.id, 0n))
  }),
  'admission/another difficulty than the seed is for': changed((group) => { group.task.difficulty = 1n }),
  'admission/a difficulty where members do not choose': asked((task) => { task.difficulty = 3n }),
  'admission/a task that the swarm does not have': asked((task) => { task.id = 'builtin/none' }),
  'admission/a task at another version': changed((group) => { group.task.version = '0' }),
  "admission/another temperature than the manifest's": changed((group) => { group.sampling.temperature /= 2 }),
  'admission/257 bytes of text for a token': first((completion) => Object.assign(completion, { text: 'a'.repeat(257), tokens: 1n, logprob: -0.5 })),
  'admission/log-probabilities that sum to less': first((completion) => {
    const packed = Buffer.alloc(4 * Number(completion.tokens))
    for (let at = 0; at < packed.length; at += 4) packed.writeFloatLE(-0.75, at)
    completion.logprobs = new Uint8Array(packed)
  }),
  'admission/text with escape': first((completion) => { completion.text = '\u001b[2J' })
}

// The second group of faults that concern two groups.
export const SECONDS = {
  'admission/another group with the same sequence': (member, group) => {
    group.policy_version += 1n
    return member.sign(group)
  }
}

const listing = (alter) => ['listing', (answer) => alter(answer)]
const groups = (alter) => ['groups', (answer) => write('groups_response', { groups: alter(answer.groups) })]
const listed = (answer, change) => write('listing_response', { ...answer, groups: [{ ...answer.groups[0], ...change }] })
const without = (kind, field, message) => {
  const { [field]: left, ...shape } = MESSAGES[kind][0]
  return encode(shape, message)
}

// Answers with one fault each: `vectors file/name` → [protocol, answer → frame].
export const ANSWERS = {
  'listings/15 groups': listing((answer) => {
    const many = Array.from({ length: REGISTRY.counts.listed + 1 }, (_, i) => ({ ...answer.groups[0], content: hash(Buffer.from([i])) }))
    return write('listing_response', { ...answer, groups: many })
  }),
  'listings/a group twice': listing((answer) => write('listing_response', { ...answer, groups: [answer.groups[0], answer.groups[0]] })),
  'listings/a listing without a life': listing((answer) => without('listing_response', 'life', answer)),
  'listings/spread is NaN': listing((answer) => listed(answer, { spread: NaN })),
  'listings/more spread than rewards have': listing((answer) => listed(answer, { spread: 0.5625 })),
  'listings/a group of more than 1 MiB': listing((answer) => listed(answer, { size: BigInt(REGISTRY.bytes.group + 1) })),
  'listings/no groups': groups(() => []),
  'listings/17 answers': groups(([answer]) => Array(REGISTRY.counts.pulled + 1).fill({ status: 'unknown', body: answer.body.subarray(0, 0) })),
  'listings/ok and no group': groups(([answer]) => [{ ...answer, body: answer.body.subarray(0, 0) }]),
  'listings/a missing group': groups(([answer]) => [{ ...answer, status: 'unknown' }])
}

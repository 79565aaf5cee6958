// 02, section 5.1 to 5.3: admission of a group before its rewards are computed.
import {
  BYTES, contentOf, groupOf, hex, openEnvelope, packedFloats, peerOf, Refused, REGISTRY, taskSeed, verify
} from './messages.mjs'

const UNWANTED = new RegExp('[\\u0000-\\u0008\\u000b\\u000c\\u000e-\\u001f\\u007f-\\u009f\\u202a-\\u202e\\u2066-\\u2069\\ufdd0-\\ufdef]|[\\ufffe\\uffff]')
const { rollouts: POSSIBLE, seconds: SECONDS } = REGISTRY

export const verdictOf = (reason) => reason === null ? 'accept' : Object.keys(REGISTRY.verdicts).find((verdict) => REGISTRY.verdicts[verdict].includes(reason))

// swarm: id; own: peer id; tasks: id → version; rules, models: from the manifest, if there is one. chooses: members choose the difficulty of their questions.
// turns: id of an episode task → maximum number of turns.
export class Admission {
  constructor ({ swarm, domain, own, tasks, rules = null, models = [], chooses = false, turns = {} }) {
    Object.assign(this, { swarm, domain, own, tasks, rules, models, chooses, turns })
    this.contents = new Set()
    this.sequences = new Set()
  }

  // Returns {reason: null or a word, group: null if refused, peer, content}. now: Unix seconds.
  judge (frame, now) {
    const content = hex(contentOf(frame))
    const seen = this.contents.has(content)
    this.contents.add(content)
    const about = { content, peer: null, group: null, reason: null }
    try {
      if (frame.length > BYTES.group) throw new Refused('oversize')
      if (seen) throw new Refused('duplicate')
      const envelope = openEnvelope(frame, BYTES.group)
      if (peerOf(envelope.key) === this.own) throw new Refused('own')
      verify(envelope, this.domain, this.swarm)
      about.peer = peerOf(envelope.key)
      const group = groupOf(envelope)
      const reason = this.#late(group, now) ?? this.#repeated(about.peer, group) ?? this.#group(group, about.peer)
      if (reason !== null) throw new Refused(reason)
      this.sequences.add(`${about.peer} ${group.sequence}`)
      about.group = group
    } catch (error) {
      if (!(error instanceof Refused)) throw error
      about.reason = error.reason
    }
    return about
  }

  #late ({ created_at: created }, now) {
    const age = now - Number(created) / 1000
    if (age > SECONDS.group_age) return 'stale'
    return age < -SECONDS.clock_skew ? 'future' : null
  }

  #repeated (peer, { sequence }) {
    return this.sequences.has(`${peer} ${sequence}`) ? 'sequence_reused' : null
  }

  #group (group, peer) {
    const { task, completions } = group
    if (task.difficulty !== 0n && !this.chooses) return 'seed'
    const own = taskSeed(this.swarm, peer, group.sequence, task.id, task.difficulty)
    if (task.seed !== own.seed || task.index !== own.index) return 'seed'
    if (!Object.hasOwn(this.tasks, task.id)) return 'unknown_task'
    if (this.tasks[task.id] !== task.version) return 'unknown_version'
    const most = this.turns[task.id] ?? 1
    if (!completions.every(({ turns }) => most === 1 ? turns.length === 0 : turns.length >= 1 && turns.length <= most)) return 'turns'
    if (this.rules !== null && !this.#agrees(group)) return 'agreement'
    if (!completions.every(addsUp)) return 'tokens'
    return completions.some(({ text }) => unwanted(text)) ? 'charset' : null
  }

  #agrees ({ model, tokenizer, sampling, completions }) {
    const rules = this.rules
    return completions.length >= rules.min_completions && completions.length <= rules.max_completions &&
      sampling.max_tokens <= rules.max_tokens && sampling.temperature === rules.temperature && sampling.top_p === rules.top_p &&
      (this.models.length === 0 || this.models.some(([one, its]) => one === hex(model) && its === hex(tokenizer)))
  }
}

function addsUp ({ text, tokens, logprob, logprobs, turns }) {
  const parts = turns.length ? turns : [{ text_bytes: BigInt(Buffer.byteLength(text)), tokens }]
  if (parts.some((part) => part.text_bytes > BigInt(POSSIBLE.bytes_per_token) * part.tokens)) return false
  if (logprobs.length === 0) return true
  const sum = packedFloats(logprobs).reduce((a, b) => a + b, 0)
  return Math.abs(sum - logprob) <= POSSIBLE.logprob_sum_absolute + POSSIBLE.logprob_sum_relative * Math.abs(sum)
}

const unwanted = (text) => UNWANTED.test(text)

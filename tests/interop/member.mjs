// A member of a swarm that has a manifest: it joins by an invite, tells what members tell each other, and shares groups both ways.
import crypto from 'node:crypto'
import { Admission } from './admission.mjs'
import {
  BYTES, chooseTask, contentOf, DOMAINS, equal, falselyListed, hash, hex, listedPositions, openManifest, openSession, openSummary, PAYLOAD,
  read, seal, SESSION, SUMMARY, taskSeed
} from './messages.mjs'
import { encode } from './msgpack.mjs'
import { Node } from './node.mjs'
import { question, spread } from './tasks.mjs'
import { store } from './zstd.mjs'

const MODEL = hash(Buffer.from('a model that nobody else has'))
const TOKENIZER = hash(Buffer.from('its tokenizer'))
const now = () => BigInt(Date.now())

export class Member {
  // invite: addresses, then /swarm/ and the swarm id in hex (01, section 6). seed: 32 bytes, of the key.
  static async join (invite, seed) {
    const [addresses, id] = invite.split('/swarm/')
    const node = await Node.start(seed)
    const contact = await node.dial(addresses.split(',')[0])
    const swarm = new Uint8Array(Buffer.from(id, 'hex'))
    const { manifest: signed, successor } = await node.ask(contact.peer, 'manifest', { swarm })
    const opened = openManifest(signed)
    if (!equal(opened.swarm, swarm)) throw new Error('another manifest than the invite names')
    const member = new Member(node, contact, swarm, signed, opened.manifest)
    member.successor = successor
    await member.#serve()
    return member
  }

  constructor (node, contact, swarm, signed, manifest) {
    Object.assign(this, { node, contact, swarm, signed, manifest })
    this.tasks = Object.fromEntries(manifest.tasks.map(({ id, version }) => [id, version]))
    this.admission = new Admission({
      swarm, domain: DOMAINS.rollout, own: node.peer, tasks: this.tasks, rules: manifest.rollouts,
      models: manifest.models.map(({ fingerprint, tokenizer }) => [hex(fingerprint), hex(tokenizer)])
    })
    this.shelf = new Map() // content id in hex → {frame, listed, position}
    this.life = new Uint8Array(crypto.randomBytes(8))
    this.session = { session: new Uint8Array(crypto.randomBytes(16)), started_at: now() }
    this.served = {}
    this.sessionsTold = []
    this.summariesTold = []
  }

  // ---- what members tell each other (01)

  async #serve () {
    const count = (name, answer) => this.node.serve(name, (peer, request) => {
      const response = answer(peer, request)
      this.served[name] = (this.served[name] ?? 0) + 1
      return response
    })
    const nothing = new Uint8Array()
    await count('manifest', (peer, frame) => {
      return { manifest: equal(read('manifest_request', frame).swarm, this.swarm) ? this.signed : nothing, successor: nothing }
    })
    await count('peers', (peer, frame) => {
      read('peers_request', frame)
      return { swarm: this.swarm, peers: [] } // it knows nobody that it has dialled but who asks
    })
    await count('session', (peer, frame) => {
      const told = openSession(frame, this.swarm)
      if (told.peer !== peer) throw new Error("somebody else's session")
      this.sessionsTold.push(told)
      return { sessions: [] }
    })
    await count('summary', (peer, frame) => {
      const { summary } = read('summary_request', frame)
      if (summary.length) this.summariesTold.push(openSummary(summary, this.swarm))
      return { summaries: [this.#summary()] }
    })
    await count('listing', (peer, frame) => this.#list(read('listing_request', frame)))
    await count('groups', (peer, frame) => ({ groups: read('groups_request', frame).contents.map((content) => this.#give(content)) }))
  }

  #summary () {
    const about = {
      name: 'foreign', version: '0', created_at: now(), uptime: 0n, step: 0n, policy_version: 0n, reward: -1, published: 0n, peers: 1n
    }
    return seal(this.node.signer, DOMAINS.summary, this.swarm, encode(SUMMARY, about))
  }

  async greet () {
    const peer = this.contact.peer
    const session = seal(this.node.signer, DOMAINS.session, this.swarm, encode(SESSION, { ...this.session, issued_at: now() }))
    const { sessions } = await this.node.ask(peer, 'session', session)
    const { summaries } = await this.node.ask(peer, 'summary', { summary: this.#summary() })
    const peers = await this.node.ask(peer, 'peers', { swarm: this.swarm, addresses: this.node.host.getMultiaddrs().map((one) => one.toString().split('/p2p/')[0]) })
    return {
      sessions: sessions.map((session) => openSession(session, this.swarm).peer),
      summaries: summaries.map((summary) => openSummary(summary, this.swarm)),
      same: equal(peers.swarm, this.swarm),
      peers: peers.peers
    }
  }

  // ---- groups of others

  async list (cursor = { life: new Uint8Array(), position: 0n }) {
    return this.node.ask(this.contact.peer, 'listing', { swarm: this.swarm, ...cursor })
  }

  // Asks for listed groups; each comes with its reason, null where it was admitted and is as listed.
  async pull (listed) {
    const { groups } = await this.node.ask(this.contact.peer, 'groups', { contents: listed.map(({ content }) => content) })
    if (groups.length !== listed.length) throw new Error('not as many as were asked for')
    const admission = new Admission(this.admission)
    return groups.map(({ status, body }, i) => {
      if (status !== 'ok') return { status }
      const judged = admission.judge(body, Date.now() / 1000, BYTES.group)
      const reason = judged.reason ?? falselyListed(listed[i], body, DOMAINS.rollout, this.swarm)
      return { status, ...judged, reason, frame: body, spreadAsListed: judged.group && Math.abs(spread(rewardsOf(judged.group)) - listed[i].spread) < 0.01 }
    })
  }

  // ---- its own groups

  // Four right answers and four wrong ones to question number `sequence`. With `long`, wrong ones have 12,000 characters.
  group (sequence, long = false) {
    const { seed, index } = taskSeed(this.swarm, this.node.peer, sequence)
    const id = chooseTask(Object.keys(this.tasks), seed, index)
    const task = { id, version: this.tasks[id], seed, index, difficulty: 0n }
    const { answer } = question(task)
    const wrong = (i) => long ? crypto.randomBytes(6000).toString('hex') : `${answer}${i}`
    const texts = [answer, `think. <answer>${answer}</answer>`, answer, answer, wrong(1), wrong(2), wrong(3), wrong(4)]
    const { temperature, top_p: topP, max_tokens: most } = this.manifest.rollouts
    const nothing = new Uint8Array()
    return {
      type: 'rollout', task, model: MODEL, tokenizer: TOKENIZER, policy_version: 0n, created_at: now(), sequence: BigInt(sequence),
      sampling: { temperature, top_p: topP, max_tokens: most },
      completions: texts.map((text) => {
        const tokens = BigInt(Buffer.byteLength(text))
        return { text, tokens, logprob: -0.5 * Number(tokens), finish: 'eos', token_ids: nothing, logprobs: nothing }
      })
    }
  }

  sign (message, codec = 'raw') {
    const payload = encode(PAYLOAD, message)
    return seal(this.node.signer, DOMAINS.rollout, this.swarm, codec === 'zstd' ? store(payload) : payload, codec)
  }

  // Lists a group.
  offer (sequence, { long = false, codec = 'raw' } = {}) {
    const group = this.group(sequence, long)
    return this.offerFrame(this.sign(group, codec), group)
  }

  offerFrame (frame, group) { return this.#keep(frame, group) }

  #keep (frame, group) {
    const listed = {
      content: contentOf(frame), author: this.node.signer.key, task: group.task.id, created_at: group.created_at, size: BigInt(frame.length),
      spread: Math.min(0.5, spread(rewardsOf(group)))
    }
    this.shelf.set(hex(listed.content), { frame, listed, position: BigInt(this.shelf.size + 1) })
    return hex(listed.content)
  }

  #give (content) {
    const kept = this.shelf.get(hex(content))
    return kept ? { status: 'ok', body: kept.frame } : { status: 'unknown', body: new Uint8Array() }
  }

  #list (request) {
    const about = { life: this.life, position: BigInt(this.shelf.size) }
    if (!equal(request.swarm, this.swarm)) return { status: 'unknown', ...about, groups: [] }
    const kept = new Map([...this.shelf.values()].map(({ listed, position }) => [position, listed]))
    return { status: 'ok', ...about, groups: listedPositions(this.life, [...kept.keys()], about.position, request).map((at) => kept.get(at)) }
  }

  async stop () { await this.node.stop() }
}

// Of a group, as this client computes them.
export function rewardsOf ({ task, completions }) {
  const asked = question(task)
  return completions.map(({ text }) => asked.reward(text))
}


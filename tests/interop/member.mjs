// A member of a swarm with a manifest: it joins by an invite, answers requests of members, and shares groups both ways.
import crypto from 'node:crypto'
import { setTimeout as sleep } from 'node:timers/promises'
import { Admission } from './admission.mjs'
import {
  BYTES, chooseTask, contentOf, DOMAINS, equal, falselyListed, GROUP, hash, hex, listedPositions, openEnvelope, openGroup, openManifest, openSession, openSummary, read,
  REGISTRY, seal, SESSION, SUMMARY, taskSeed
} from './messages.mjs'
import { encode } from './msgpack.mjs'
import { Node } from './node.mjs'
import { question, spread } from './tasks.mjs'
import { store } from './zstd.mjs'

const MODEL = hash(Buffer.from('a model that nobody else has'))
const TOKENIZER = hash(Buffer.from('its tokenizer'))
const now = () => BigInt(Date.now())

export class Member {
  // invite: addresses, then /swarm/ and the swarm id in hex (01, section 6). seed: 32 bytes of the key.
  // turns: id of an episode task → maximum number of turns, from the document of the task.
  static async join (invite, seed, turns = {}) {
    const [addresses, id] = invite.split('/swarm/')
    const member = new Member(await Node.start(seed), new Uint8Array(Buffer.from(id, 'hex')))
    await member.#serve() // before connecting, because a peer may poll at once
    member.contact = await member.node.dial(addresses.split(',')[0])
    const { manifest, successor } = await member.node.ask(member.contact.peer, 'manifest', { swarm: member.swarm })
    member.successor = successor
    member.#adopt(manifest, turns)
    return member
  }

  constructor (node, swarm) {
    Object.assign(this, { node, swarm, signed: new Uint8Array() })
    this.shelf = new Map() // content id in hex → {frame, listed, position}
    this.life = new Uint8Array(crypto.randomBytes(8))
    this.session = { session: new Uint8Array(crypto.randomBytes(16)), started_at: now() }
    this.news = Promise.withResolvers()
    this.spoils = {} // protocol → answer → frame, for its next answer that has groups
    this.served = {}
    this.held = 0
    this.sessionsTold = []
    this.summariesTold = []
  }

  // signed: the envelope with the swarm's manifest.
  #adopt (signed, turns) {
    const { swarm, manifest } = openManifest(signed)
    if (!equal(swarm, this.swarm)) throw new Error('another manifest than the invite names')
    Object.assign(this, { signed, manifest })
    this.tasks = Object.fromEntries(manifest.tasks.map(({ id, version }) => [id, version]))
    this.admission = new Admission({
      swarm, domain: DOMAINS.rollout, own: this.node.peer, tasks: this.tasks, rules: manifest.rollouts,
      models: manifest.models.map(({ fingerprint, tokenizer }) => [hex(fingerprint), hex(tokenizer)]),
      chooses: manifest.protocols.includes(REGISTRY.rules.choice),
      turns
    })
  }

  // ---- peers, sessions and summaries (01)

  async #serve () {
    const count = (name, answer) => this.node.serve(name, async (peer, request) => {
      const response = await answer(peer, request)
      this.served[name] = (this.served[name] ?? 0) + 1
      return this.#spoiled(name, response)
    })
    const nothing = new Uint8Array()
    await count('manifest', (peer, frame) => {
      return { manifest: equal(read('manifest_request', frame).swarm, this.swarm) ? this.signed : nothing, successor: nothing }
    })
    await count('peers', (peer, frame) => {
      read('peers_request', frame)
      return { swarm: this.swarm, peers: [] } // the requester is its only dialled peer
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
    await count('listing', (peer, frame) => this.#hold(peer, read('listing_request', frame)))
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

  // ---- groups of peers

  // Polls; the responder may hold the poll open for `patience` seconds.
  async list ({ life = new Uint8Array(), position = 0n, patience = 0n } = {}) {
    return this.node.ask(this.contact.peer, 'listing', { swarm: this.swarm, life, position, patience })
  }

  // Fetches listed groups, each with a reason: null if it was admitted and matches its listing.
  async fetch (listed) {
    const { groups } = await this.node.ask(this.contact.peer, 'groups', { contents: listed.map(({ content }) => content) })
    if (groups.length !== listed.length) throw new Error('not as many as were asked for')
    const admission = new Admission(this.admission)
    return groups.map(({ status, body }, i) => {
      if (status !== 'ok') return { status }
      const judged = admission.judge(body, Date.now() / 1000)
      const reason = judged.reason ?? falselyListed(listed[i], body, DOMAINS.rollout, this.swarm)
      return { status, ...judged, reason, frame: body, spreadAsListed: spreadAsListed(judged.group, listed[i]) }
    })
  }

  // ---- its own groups

  // Four right and four wrong completions for question number `sequence`. With `long`, wrong ones have 12,000 characters.
  group (sequence, long = false) {
    const id = chooseTask(Object.keys(this.tasks), this.swarm, this.node.peer, sequence)
    const { seed, index } = taskSeed(this.swarm, this.node.peer, sequence, id, 0n)
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
        return { text, tokens, logprob: -0.5 * Number(tokens), finish: 'eos', token_ids: nothing, logprobs: nothing, turns: [] }
      })
    }
  }

  sign (message, codec = 'raw') {
    const payload = encode(GROUP, message)
    return seal(this.node.signer, DOMAINS.rollout, this.swarm, codec === 'zstd' ? store(payload) : payload, codec)
  }

  // Puts a group on the shelf.
  offer (sequence, { long = false, codec = 'raw' } = {}) {
    const group = this.group(sequence, long)
    return this.offerFrame(this.sign(group, codec), group)
  }

  // Puts a group of another member on the shelf, after a check of form and signature. Its spread comes from other listings.
  relay (frame, spreadOfRewards) {
    const { group } = openGroup(frame, DOMAINS.rollout, this.swarm)
    return this.offerFrame(frame, group, openEnvelope(frame, BYTES.group).key, spreadOfRewards)
  }

  // Puts a frame on the shelf, listed as `group`.
  offerFrame (frame, group, author = this.node.signer.key, spreadOfRewards = spread(rewardsOf(group))) {
    const listed = {
      content: contentOf(frame), author, task: group.task.id, created_at: group.created_at, size: BigInt(frame.length),
      spread: Math.min(0.5, spreadOfRewards)
    }
    this.shelf.set(hex(listed.content), { frame, listed, position: BigInt(this.shelf.size + 1) })
    this.news.resolve()
    this.news = Promise.withResolvers()
    return hex(listed.content)
  }

  #give (content) {
    const kept = this.shelf.get(hex(content))
    return kept ? { status: 'ok', body: kept.frame } : { status: 'unknown', body: new Uint8Array() }
  }

  #list (peer, request) {
    const [own, reader] = [this.node.peer, peer]
    const about = { life: this.life, position: BigInt(this.shelf.size) }
    if (!equal(request.swarm, this.swarm)) return { status: 'unknown', ...about, groups: [] }
    const kept = new Map([...this.shelf.values()].map(({ listed, position }) => [position, listed]))
    const held = [...kept.keys()].map((position) => [position, own, own])
    const positions = listedPositions({ life: this.life, last: about.position, held, own, reader, request })
    return { status: 'ok', ...about, groups: positions.map((at) => kept.get(at)) }
  }

  // Answers a poll at once if the listing is not empty; otherwise when there is news or the patience ends.
  async #hold (peer, request) {
    const answer = this.#list(peer, request)
    if (answer.status !== 'ok' || answer.groups.length > 0 || request.patience === 0n) return answer
    await Promise.race([this.news.promise, sleep(1000 * Number(request.patience), null, { ref: false })])
    this.held += 1
    await sleep(100) // the groups of one step arrive together
    return this.#list(peer, request)
  }

  #spoiled (name, answer) {
    const spoil = this.spoils[name]
    if (!spoil || !answer.groups.some((group) => group.content || group.body.length)) return answer
    delete this.spoils[name]
    return spoil(answer)
  }

  async stop () { await this.node.stop() }
}

function spreadAsListed (group, listed) {
  const rewards = group && rewardsOf(group)
  return rewards && Math.abs(spread(rewards) - listed.spread) < 0.01
}

// Rewards of a group as this client computes them; null for an unknown task.
export function rewardsOf ({ task, completions }) {
  const asked = question(task)
  return asked && completions.map(({ text }) => asked.reward(text))
}


// A member that a test drives: `node client.mjs`, one JSON request a line, {"do": a name below, …}, answered by one line. Bytes are hex.
import crypto from 'node:crypto'
import readline from 'node:readline'
import { ANSWERS, FAULTS, SECONDS } from './faults.mjs'
import { contentOf, hex } from './messages.mjs'
import { Member, rewardsOf } from './member.mjs'

const members = new Map()
const plain = (key, value) => value instanceof Uint8Array ? hex(value) : typeof value === 'bigint' ? Number(value) : value
const bytes = (text) => new Uint8Array(Buffer.from(text, 'hex'))

const told = ({ frame, group, message, ...about }) => ({
  ...about, sequence: group?.sequence, texts: group?.completions.map(({ text }) => text), turns: group?.completions.map(({ turns }) => turns.length),
  rewards: group ? rewardsOf(group) : undefined
})

const ACTIONS = {
  // Joins by an invite, with a key from `name`.
  async join ({ name, invite, turns }) {
    const member = await Member.join(invite, new Uint8Array(crypto.createHash('sha256').update(name).digest()), turns)
    members.set(name, member)
    const { encryption, multiplexer } = member.contact
    const known = await member.node.host.peerStore.get(member.contact.peer)
    return { peer: member.node.peer, encryption, multiplexer, protocols: known.protocols, manifest: member.manifest, successor: member.successor }
  },
  leave: async ({ name }) => {
    await members.get(name).stop()
    members.delete(name)
  },
  greet: ({ name }) => members.get(name).greet(),
  told: ({ name }) => {
    const { served, held, sessionsTold, summariesTold } = members.get(name)
    return { served, held, sessions: sessionsTold.map(({ peer }) => peer), summaries: summariesTold.map(({ peer, summary }) => ({ peer, version: summary.version })) }
  },
  async list ({ name, ...cursor }) {
    ACTIONS.poll({ name, ...cursor })
    return ACTIONS.polled({ name })
  },
  // Starts a poll; `polled` waits for its answer and adds the duration in seconds.
  poll ({ name, life = '', position = 0, patience = 0 }) {
    const began = performance.now()
    const answer = members.get(name).list({ life: bytes(life), position: BigInt(position), patience: BigInt(patience) })
    members.get(name).polling = answer.then((listing) => ({ ...listing, took: (performance.now() - began) / 1000 }))
  },
  async polled ({ name }) {
    const listing = await members.get(name).polling
    members.get(name).listed = listing.groups
    return listing
  },
  // Fetches the groups of the last listing.
  async fetch ({ name }) {
    const member = members.get(name)
    member.fetched = await member.fetch(member.listed)
    return member.fetched.map(told)
  },
  offer: ({ name, sequence, long, codec }) => members.get(name).offer(sequence, { long, codec }),
  // Lists a group that another member signed.
  relay: ({ name, frame, spread }) => members.get(name).relay(bytes(frame), spread),
  faults: () => Object.keys({ ...FAULTS, ...SECONDS }),
  answers: () => Object.keys(ANSWERS),
  // Lists a frame with one fault, as if it were an honest group.
  spoil ({ name, fault, sequence }) {
    const member = members.get(name)
    const [honest, group] = [member.group(sequence), member.group(sequence)]
    const second = SECONDS[fault]
    if (second) member.offerFrame(member.sign(group), honest)
    return member.offerFrame(second ? second(member, group) : FAULTS[fault](member, group), honest)
  },
  // Offers a group and corrupts the next answer that has groups.
  spoilAnswer ({ name, fault, sequence }) {
    const [protocol, spoil] = ANSWERS[fault]
    members.get(name).spoils[protocol] = spoil
    return members.get(name).offer(sequence)
  },
  // Lists a fetched group: unchanged, or under this client's signature.
  copy ({ name, content, signed }) {
    const member = members.get(name)
    const { frame, group } = member.fetched.find((one) => hex(contentOf(one.frame)) === content)
    return member.offerFrame(signed ? member.sign(group) : frame, group)
  },
  // Sends arbitrary bytes as a request and returns its result.
  async ask ({ name, protocol, request }) {
    const member = members.get(name)
    try {
      return { response: await member.node.askBytes(member.contact.peer, protocol, bytes(request)) }
    } catch (error) {
      return { error: error.name }
    }
  }
}

process.on('unhandledRejection', (error) => console.error('unhandled', error))
for await (const line of readline.createInterface({ input: process.stdin })) {
  const { do: action, ...given } = JSON.parse(line)
  try {
    console.log(JSON.stringify({ answer: await ACTIONS[action](given) }, plain))
  } catch (error) {
    console.log(JSON.stringify({ error: `${error.stack}` }))
  }
}
process.exit(0)

// A client that a test drives by lines of JSON, {"do": a name below, …}: it joins a swarm by an invite, polls, fetches groups and verifies them.
import readline from 'node:readline'
import { multiaddr } from '@multiformats/multiaddr'
import { DOMAINS, equal, hex, openListed, openManifest, read, REGISTRY, taskSeed, write } from './messages.mjs'
import { check, Refused } from './msgpack.mjs'

// js-libp2p needs this function of Node 22, so it is imported below.
Promise.withResolvers ??= () => {
  const made = {}
  return Object.assign(made, { promise: new Promise((resolve, reject) => Object.assign(made, { resolve, reject })) })
}
const { noise } = await import('@chainsafe/libp2p-noise')
const { yamux } = await import('@chainsafe/libp2p-yamux')
const { identify } = await import('@libp2p/identify')
const { tcp } = await import('@libp2p/tcp')
const { createLibp2p } = await import('libp2p')

const { protocols: PROTOCOLS, timeouts: TIMEOUTS, bytes: BYTES } = REGISTRY
const bytes = (text) => new Uint8Array(Buffer.from(text, 'hex'))

// u32be length ‖ frame. Throws before more than `limit` bytes are buffered.
async function readFrame (stream, limit) {
  let got = Buffer.alloc(0)
  for await (const chunk of stream) {
    got = Buffer.concat([got, chunk.subarray()])
    if (got.length >= 4 && got.readUInt32BE() > limit) throw new Error(`${got.readUInt32BE()} bytes announced, ${limit} allowed`)
    if (got.length >= 4 && got.length >= 4 + got.readUInt32BE()) return new Uint8Array(got.subarray(4, 4 + got.readUInt32BE()))
  }
  throw new Error('the stream ended before its frame did')
}

// Sends a request and returns the response. name: of [protocols] in registry.toml.
async function ask (name, request) {
  const signal = AbortSignal.timeout(1000 * (TIMEOUTS[name] + Number(request.patience ?? 0)))
  const stream = await host.dialProtocol(contact, PROTOCOLS[name], { signal })
  signal.addEventListener('abort', () => stream.abort(signal.reason))
  const frame = write(name, request)
  const size = Buffer.alloc(4)
  size.writeUInt32BE(frame.length)
  if (!stream.send(Buffer.concat([size, frame]))) await stream.onDrain()
  const response = read(name, await readFrame(stream, BYTES[`${name}_response`]))
  await stream.close()
  return response
}

// A fetched group with a reason: null, or why its form, signature, listing or question is refused.
function verified (listed, frame) {
  try {
    const { peer, group: { task, sequence, completions } } = openListed(listed, frame, DOMAINS.rollout, swarm)
    const own = taskSeed(swarm, peer, sequence, task.id)
    check(task.seed === own.seed && task.index === own.index, 'seed')
    check(manifest.tasks.some(({ id, version }) => id === task.id && version === task.version), 'unknown_task')
    return { reason: null, peer, sequence, texts: completions.map(({ text }) => text) }
  } catch (error) {
    if (!(error instanceof Refused)) throw error
    return { reason: error.reason }
  }
}

const host = await createLibp2p({
  addresses: { listen: [] },
  transports: [tcp()],
  connectionEncrypters: [noise()],
  streamMuxers: [yamux()],
  connectionGater: { denyDialMultiaddr: () => false }, // loopback
  services: { identify: identify() }
})
let contact, swarm, manifest, listed

const ACTIONS = {
  // invite: addresses, then /swarm/ and the swarm id in hex (01, section 6).
  async join ({ invite }) {
    const [addresses, id] = invite.split('/swarm/')
    swarm = bytes(id)
    const connection = await host.dial(multiaddr(addresses.split(',')[0]))
    contact = connection.remotePeer
    const opened = openManifest((await ask('manifest', { swarm })).manifest)
    if (!equal(opened.swarm, swarm)) throw new Error('another manifest than the invite names')
    manifest = opened.manifest
    return { encryption: connection.encryption, multiplexer: connection.multiplexer, manifest }
  },
  // Polls; the responder may hold the poll open for `patience` seconds.
  async list ({ life = '', position = 0, patience = 0 }) {
    const listing = await ask('listing', { swarm, life: bytes(life), position: BigInt(position), patience: BigInt(patience) })
    listed = listing.groups
    return listing
  },
  // Fetches the groups of the last listing. damage: change a byte of each before it is verified.
  async fetch ({ damage = false }) {
    const { groups } = await ask('groups', { contents: listed.map(({ content }) => content) })
    return groups.map(({ status, body }, i) => {
      if (damage) body[body.length - 100] ^= 1
      return status === 'ok' ? { status, ...verified(listed[i], body) } : { status }
    })
  }
}

const plain = (key, value) => value instanceof Uint8Array ? hex(value) : typeof value === 'bigint' ? Number(value) : value
for await (const line of readline.createInterface({ input: process.stdin })) {
  const { do: action, ...given } = JSON.parse(line)
  try {
    console.log(JSON.stringify({ answer: await ACTIONS[action](given) }, plain))
  } catch (error) {
    console.log(JSON.stringify({ error: `${error.stack}` }))
  }
}
process.exit(0)

// A libp2p host as in 01, section 2, and requests as in 00, section 1.
import './platform.mjs'
import { multiaddr } from '@multiformats/multiaddr'
import { BYTES, read, REGISTRY, signingKey, write } from './messages.mjs'

const { noise } = await import('@chainsafe/libp2p-noise')
const { yamux } = await import('@chainsafe/libp2p-yamux')
const { generateKeyPairFromSeed } = await import('@libp2p/crypto/keys')
const { identify } = await import('@libp2p/identify')
const { tcp } = await import('@libp2p/tcp')
const { createLibp2p } = await import('libp2p')

const { protocols: PROTOCOLS, timeouts: TIMEOUTS, seconds: { patience: PATIENCE } } = REGISTRY

function later (seconds) {
  const controller = new AbortController()
  const timer = setTimeout(() => controller.abort(new Error(`nothing within ${seconds} s`)), 1000 * seconds)
  return { signal: controller.signal, over: () => clearTimeout(timer) }
}

// u32be length ‖ frame. Throws before more than `limit` bytes are buffered.
async function readFrame (stream, limit, signal) {
  let got = Buffer.alloc(0)
  signal.addEventListener('abort', () => stream.abort(signal.reason))
  for await (const chunk of stream) {
    got = Buffer.concat([got, chunk.subarray()])
    if (got.length >= 4 && got.readUInt32BE() > limit) throw new Error(`${got.readUInt32BE()} bytes announced, ${limit} allowed`)
    if (got.length >= 4 && got.length >= 4 + got.readUInt32BE()) return new Uint8Array(got.subarray(4, 4 + got.readUInt32BE()))
  }
  throw new Error('the stream ended before its frame did')
}

async function writeFrame (stream, frame) {
  const length = Buffer.alloc(4)
  length.writeUInt32BE(frame.length)
  if (!stream.send(Buffer.concat([length, frame]))) await stream.onDrain()
}

export class Node {
  static async start (seed) {
    const privateKey = await generateKeyPairFromSeed('Ed25519', seed)
    const host = await createLibp2p({
      privateKey,
      addresses: { listen: ['/ip4/127.0.0.1/tcp/0'] },
      transports: [tcp()],
      connectionEncrypters: [noise()],
      streamMuxers: [yamux()],
      connectionGater: { denyDialMultiaddr: () => false }, // loopback
      services: { identify: identify() }
    })
    return new Node(host, privateKey.publicKey.raw, signingKey(seed, privateKey.publicKey.raw))
  }

  constructor (host, key, sign) {
    Object.assign(this, { host, signer: { key, sign }, peer: host.peerId.toString() })
  }

  // Dials an address that ends in /p2p/… and returns its peer id.
  async dial (address) {
    const connection = await this.host.dial(multiaddr(address))
    return { peer: connection.remotePeer, encryption: connection.encryption, multiplexer: connection.multiplexer }
  }

  // Sends a request and returns the decoded response. name: of [protocols] in registry.toml.
  async ask (peer, name, request) {
    const frame = request instanceof Uint8Array ? request : write(`${name}_request`, request)
    const response = await this.askBytes(peer, name, frame, Number(request.patience ?? 0))
    return read(`${name}_response`, response)
  }

  // patience: seconds for which the responder may hold a poll.
  async askBytes (peer, name, request, patience = 0) {
    const { signal, over } = later(TIMEOUTS[name] + patience)
    try {
      const stream = await this.host.dialProtocol(peer, PROTOCOLS[name], { signal })
      await writeFrame(stream, request)
      const response = await readFrame(stream, BYTES[`${name}_response`], signal)
      await stream.close()
      return response
    } finally {
      over()
    }
  }

  // answer(peer id, frame) → message, or a raw frame; an exception resets the stream.
  async serve (name, answer) {
    await this.host.handle(PROTOCOLS[name], async (stream, connection) => {
      const { signal, over } = later(TIMEOUTS[name] + (name === 'listing' ? PATIENCE : 0))
      try {
        const request = await readFrame(stream, BYTES[`${name}_request`], signal)
        const response = await answer(connection.remotePeer.toString(), request)
        await writeFrame(stream, response instanceof Uint8Array ? response : write(`${name}_response`, response))
        await stream.close()
      } catch (error) {
        stream.abort(error)
      } finally {
        over()
      }
    })
  }

  async stop () { await this.host.stop() }
}

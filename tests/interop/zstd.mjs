// 00, section 5: exactly one Zstandard frame (RFC 8878) that declares its size. The headers are read here, so that nothing is decompressed
// that declares too much; fzstd decodes the blocks.
import { Decompress } from 'fzstd'
import { check, Refused } from './msgpack.mjs'
import { xxh64 } from './xxh64.mjs'

const MAGIC = 0xfd2fb528
const LARGEST_BLOCK = 1 << 17

function frameHeader (data) {
  const view = new DataView(data.buffer, data.byteOffset, data.byteLength)
  try {
    check(view.getUint32(0, true) === MAGIC, 'compression')
    const descriptor = data[4]
    check((descriptor & 8) === 0, 'compression') // reserved
    const single = (descriptor & 32) !== 0
    let at = 5
    let window = 0n
    if (!single) {
      const byte = view.getUint8(at++)
      const base = 1n << BigInt(10 + (byte >> 3))
      window = base + (base / 8n) * BigInt(byte & 7)
    }
    for (let left = [0, 1, 2, 4][descriptor & 3]; left > 0; left--) check(view.getUint8(at++) === 0, 'compression') // a dictionary
    const flag = descriptor >> 6
    check(flag > 0 || single, 'compression') // does not declare its size
    const declared = [() => BigInt(view.getUint8(at)), () => BigInt(view.getUint16(at, true)) + 256n, () => BigInt(view.getUint32(at, true)),
      () => view.getBigUint64(at, true)][flag]()
    at += 1 << flag
    return { at, declared, window: single ? declared : window, checksum: (descriptor & 4) !== 0 }
  } catch (error) {
    throw error instanceof Refused ? error : new Refused('compression') // it ends within its header
  }
}

function blocks (data, at) { // [from, to] of each, with its header
  const found = []
  for (let last = false; !last;) {
    check(at + 3 <= data.length, 'compression')
    const bits = data[at] | (data[at + 1] << 8) | (data[at + 2] << 16)
    const [type, size] = [(bits >> 1) & 3, bits >> 3]
    check(type !== 3 && size <= LARGEST_BLOCK, 'compression')
    const to = at + 3 + (type === 1 ? 1 : size)
    check(to <= data.length, 'compression')
    found.push([at, to])
    last = (bits & 1) === 1
    at = to
  }
  return found
}

// Decompresses `data` to at most `limit` bytes. Throws Refused.
export function decompress (data, limit, largestWindow) {
  const { at, declared, window, checksum } = frameHeader(data)
  check(declared <= BigInt(limit), 'oversize')
  check(window <= BigInt(largestWindow), 'compression')
  const all = blocks(data, at)
  const end = all.at(-1)[1]
  check(end + (checksum ? 4 : 0) === data.length, 'compression')
  const content = Buffer.alloc(Number(declared))
  let length = 0
  const stream = new Decompress((chunk) => {
    check(length + chunk.length <= content.length, 'compression')
    content.set(chunk, length)
    length += chunk.length
  })
  try {
    stream.push(data.slice(0, at))
    for (const [from, to] of all) stream.push(data.slice(from, to))
    if (checksum) stream.push(data.slice(end))
  } catch (error) {
    throw error instanceof Refused ? error : new Refused('compression')
  }
  check(length === content.length, 'compression')
  if (checksum) check(Number(xxh64(content) & 0xffffffffn) === new DataView(data.buffer, data.byteOffset + end).getUint32(0, true), 'compression')
  return new Uint8Array(content)
}

// `content` in raw blocks, which need no compressor.
export function store (content) {
  const frame = [Buffer.from([0x28, 0xb5, 0x2f, 0xfd, 0xa0]), Buffer.alloc(4)] // a single segment, 4 bytes of size
  frame[1].writeUInt32LE(content.length)
  for (let at = 0; at === 0 || at < content.length; at += LARGEST_BLOCK) {
    const block = content.subarray(at, at + LARGEST_BLOCK)
    const head = Buffer.alloc(3)
    head.writeUIntLE((block.length << 3) | (at + LARGEST_BLOCK >= content.length ? 1 : 0), 0, 3)
    frame.push(head, block)
  }
  return new Uint8Array(Buffer.concat(frame))
}

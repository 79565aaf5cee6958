// 00, section 5: exactly one Zstandard frame (RFC 8878) that declares its size. The headers are read here, so that nothing is
// decompressed that declares too much; fzstd decodes the blocks.
import { Decompress } from 'fzstd'
import xxhash from 'xxhash-wasm'
import { check, Refused } from './msgpack.mjs'

const { h64Raw } = await xxhash()
const LARGEST_BLOCK = 1 << 17

function frameHeader (data) {
  const view = new DataView(data.buffer, data.byteOffset, data.byteLength)
  check(view.getUint32(0, true) === 0xfd2fb528, 'compression') // magic number
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
  const declared = [
    () => BigInt(view.getUint8(at)), () => BigInt(view.getUint16(at, true)) + 256n, () => BigInt(view.getUint32(at, true)), () => view.getBigUint64(at, true)
  ][flag]()
  return { at: at + (1 << flag), declared, window: single ? declared : window, checksum: (descriptor & 4) !== 0 }
}

function blocks (data, at) { // [from, to] of each, with its header
  const found = []
  for (let last = false; !last; at = found.at(-1)[1]) {
    check(at + 3 <= data.length, 'compression')
    const bits = data[at] | (data[at + 1] << 8) | (data[at + 2] << 16)
    const [type, size] = [(bits >> 1) & 3, bits >> 3]
    const to = at + 3 + (type === 1 ? 1 : size)
    check(type !== 3 && size <= LARGEST_BLOCK && to <= data.length, 'compression')
    found.push([at, to])
    last = (bits & 1) === 1
  }
  return found
}

// Decompresses `data` to at most `limit` bytes. Throws Refused.
export function decompress (data, limit, largestWindow) {
  try {
    const { at, declared, window, checksum } = frameHeader(data)
    check(declared <= BigInt(limit), 'oversize')
    check(window <= BigInt(largestWindow), 'compression')
    const all = blocks(data, at)
    const end = all.at(-1)[1]
    check(end + (checksum ? 4 : 0) === data.length, 'compression')
    const content = new Uint8Array(Number(declared))
    let length = 0
    const stream = new Decompress((chunk) => {
      content.set(chunk, length) // throws if it does not fit
      length += chunk.length
    })
    for (const [from, to] of [[0, at], ...all, [end, data.length]]) if (to > from) stream.push(data.slice(from, to))
    check(length === content.length, 'compression')
    const stored = checksum && new DataView(data.buffer, data.byteOffset + end).getUint32(0, true)
    check(!checksum || Number(h64Raw(content) & 0xffffffffn) === stored, 'compression')
    return content
  } catch (error) {
    throw error instanceof Refused ? error : new Refused('compression') // it ends within its header, or a block is corrupt
  }
}

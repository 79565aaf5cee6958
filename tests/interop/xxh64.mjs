// XXH64 with seed 0: the checksum behind a Zstandard frame (RFC 8878, section 3.1.1).
const MASK = (1n << 64n) - 1n
const P1 = 0x9e3779b185ebca87n
const P2 = 0xc2b2ae3d27d4eb4fn
const P3 = 0x165667b19e3779f9n
const P4 = 0x85ebca77c2b2ae63n
const P5 = 0x27d4eb2f165667c5n

const times = (a, b) => (a * b) & MASK
const rotate = (value, bits) => ((value << bits) | (value >> (64n - bits))) & MASK
const round = (lane, input) => times(rotate((lane + times(input, P2)) & MASK, 31n), P1)
const merge = (hash, lane) => (times(hash ^ round(0n, lane), P1) + P4) & MASK

export function xxh64 (data) {
  const view = new DataView(data.buffer, data.byteOffset, data.byteLength)
  const length = data.length
  let at = 0
  let hash = P5
  if (length >= 32) {
    let lanes = [(P1 + P2) & MASK, P2, 0n, (MASK + 1n - P1) & MASK]
    for (; at + 32 <= length; at += 32) lanes = lanes.map((lane, i) => round(lane, view.getBigUint64(at + 8 * i, true)))
    hash = lanes.reduce((sum, lane, i) => (sum + rotate(lane, [1n, 7n, 12n, 18n][i])) & MASK, 0n)
    hash = lanes.reduce(merge, hash)
  }
  hash = (hash + BigInt(length)) & MASK
  for (; at + 8 <= length; at += 8) hash = (times(rotate(hash ^ round(0n, view.getBigUint64(at, true)), 27n), P1) + P4) & MASK
  if (at + 4 <= length) {
    hash = (times(rotate(hash ^ times(BigInt(view.getUint32(at, true)), P1), 23n), P2) + P3) & MASK
    at += 4
  }
  for (; at < length; at++) hash = times(rotate(hash ^ times(BigInt(data[at]), P5), 11n), P1)
  hash = times(hash ^ (hash >> 33n), P2)
  hash = times(hash ^ (hash >> 29n), P3)
  return hash ^ (hash >> 32n)
}

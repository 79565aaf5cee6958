// Judges the vectors that this client has a reader for: `node vectors.mjs FILE…` prints a line [file, name, outcome] for each.
import fs from 'node:fs'
import { hex, openGroup, read, RESPONSES } from './messages.mjs'
import { Refused } from './msgpack.mjs'

const bytes = (text) => new Uint8Array(Buffer.from(text, 'hex'))
const joined = (parts) => new Uint8Array(Buffer.concat(parts.flatMap(([part, times]) => Array(times).fill(Buffer.from(part, 'hex')))))

// JSON with integers of any size, rows without names, and bytes in hex.
function plain (value, inRow = false) {
  if (value instanceof Uint8Array) return JSON.stringify(hex(value))
  if (Array.isArray(value)) return `[${value.map((item) => plain(item, inRow)).join()}]`
  if (value !== null && typeof value === 'object') {
    const fields = Object.entries(value)
    if (inRow && ('author' in value || 'text_bytes' in value)) return `[${fields.map(([, item]) => plain(item)).join()}]`
    return `{${fields.map(([field, item]) => `${JSON.stringify(field)}:${plain(item, field === 'groups' || field === 'turns')}`).join()}}`
  }
  return typeof value === 'bigint' ? value.toString() : JSON.stringify(value)
}

// Integers beyond the range of a number become BigInts.
const load = (path) => JSON.parse(fs.readFileSync(path, 'utf8').replace(/([[:,] ?)(\d{16,})(?=[,\]}])/g, '$1"#$2"'), (_, value) => {
  return typeof value === 'string' && /^#\d+$/.test(value) ? BigInt(value.slice(1)) : value
})

const READERS = {
  group: openGroup,
  ...Object.fromEntries(Object.keys(RESPONSES).map((name) => [`${name}_response`, (frame) => read(name, frame)]))
}
for (const path of process.argv.slice(2)) {
  const { domain, swarm, vectors } = load(path)
  for (const { name, read_as: kind, frame } of vectors) {
    if (!READERS[kind]) continue
    let outcome
    try {
      outcome = { verdict: 'accept', value: READERS[kind](joined(frame), Buffer.from(domain), bytes(swarm)) }
    } catch (error) {
      if (!(error instanceof Refused)) throw error
      outcome = { verdict: 'reject', reason: error.reason }
    }
    console.log(plain([path, name, outcome]))
  }
}

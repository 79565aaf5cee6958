// Judges vectors: `node vectors.mjs FILE…` prints {file: {name: outcome}} with bytes in hex, as in the files.
import fs from 'node:fs'
import { Admission, verdictOf } from './admission.mjs'
import {
  chooseTask, contentOf, evaluationSeed, falselyListed, hex, listedPositions, MESSAGES, openGroup, openManifest, openSession, openSummary, peerOf,
  read, Refused, swarmId, taskSeed
} from './messages.mjs'
import { question, versionOf } from './tasks.mjs'

const bytes = (text) => new Uint8Array(Buffer.from(text, 'hex'))
const joined = (parts) => new Uint8Array(Buffer.concat(parts.flatMap(([part, times]) => Array(times).fill(Buffer.from(part, 'hex')))))
const ROWS = new Set(['groups', 'turns'])

// JSON with integers of any size, rows without names, and bytes in hex.
function plain (value, inRow = false) {
  if (value instanceof Uint8Array) return JSON.stringify(hex(value))
  if (Array.isArray(value)) return `[${value.map((item) => plain(item, inRow)).join()}]`
  if (value !== null && typeof value === 'object') {
    const fields = Object.entries(value)
    if (inRow && ('author' in value || 'text_bytes' in value)) return `[${fields.map(([, item]) => plain(item)).join()}]`
    return `{${fields.map(([field, item]) => `${JSON.stringify(field)}:${plain(item, ROWS.has(field))}`).join()}}`
  }
  return typeof value === 'bigint' ? value.toString() : JSON.stringify(value)
}

// Integers beyond the range of a number become BigInts.
const load = (path) => JSON.parse(fs.readFileSync(path, 'utf8').replace(/([[:,] ?)(\d{16,})(?=[,\]}])/g, '$1"#$2"'), (_, value) => {
  return typeof value === 'string' && /^#\d+$/.test(value) ? BigInt(value.slice(1)) : value
})

const READERS = {
  group: (frame, domain, swarm) => openGroup(frame, domain, swarm),
  manifest: (frame) => openManifest(frame),
  session: (frame, domain, swarm) => openSession(frame, swarm),
  summary: (frame, domain, swarm) => openSummary(frame, swarm),
  ...Object.fromEntries(Object.keys(MESSAGES).map((kind) => [kind, (frame) => read(kind, frame)]))
}

const asked = ({ task, seed, index }) => question({ id: task, seed: BigInt(seed), index: BigInt(index), difficulty: 0n })

const DERIVATIONS = {
  builtin_question: (given) => [asked(given).prompt, asked(given).answer],
  builtin_reward: ({ text, ...given }) => asked(given).reward(text),
  builtin_version: ({ task }) => versionOf(task),
  peer_id: ({ key }) => peerOf(bytes(key)),
  content_id: ({ envelope }) => contentOf(bytes(envelope)),
  swarm_id: ({ name, tasks, protocols }) => swarmId(name, tasks, protocols),
  task_seed: ({ swarm, peer, sequence, task, difficulty }) => taskSeed(bytes(swarm), peer, sequence, task, difficulty),
  evaluation_seed: ({ task, block }) => evaluationSeed(task, block),
  choose_task: ({ tasks, swarm, peer, sequence }) => chooseTask(tasks, bytes(swarm), peer, sequence),
  listing: ({ life, request, ...given }) => listedPositions({ ...given, life: bytes(life), request: { ...request, life: bytes(request.life) } }),
  listed: ({ swarm, listed: [content, author, task, created, size], frame }, domain) => falselyListed(
    { content: bytes(content), author: bytes(author), task, created_at: BigInt(created), size: BigInt(size) }, bytes(frame), domain, bytes(swarm))
}

function outcome (vector, domain, swarm) {
  if (vector.derive) return { output: DERIVATIONS[vector.derive](vector.input, domain) }
  if (vector.admit) {
    const { own, tasks, rules, models, chooses, turns, now, after } = vector.admit
    const admission = new Admission({ swarm, domain, own, tasks, rules, models, chooses, turns })
    const judged = [...after, vector.frame].map((parts) => admission.judge(joined(parts), now))
    const { reason } = judged.at(-1)
    return { verdict: verdictOf(reason), reason }
  }
  try {
    return { verdict: 'accept', value: READERS[vector.read_as](joined(vector.frame), domain, swarm) }
  } catch (error) {
    if (!(error instanceof Refused)) throw error
    return { verdict: 'reject', reason: error.reason }
  }
}

for (const path of process.argv.slice(2)) {
  const document = load(path)
  for (const vector of document.vectors) {
    console.log(plain([path, vector.name, outcome(vector, Buffer.from(document.domain), bytes(document.swarm))]))
  }
}

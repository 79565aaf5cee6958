// 06: questions and rewards of the builtin tasks.
import { hash, hex } from './messages.mjs'

function digits (name, address, count) {
  const digest = hash(Buffer.from(`swarmnode/builtin/${name}/${address}`), 64)
  return Array.from({ length: count }, (_, i) => (256 * digest[2 * i] + digest[2 * i + 1]) % 10)
}

// Version records of the two tasks from 06, for a swarm without a manifest.
const VERSIONED = {
  'builtin/copy': '["2", "builtin/copy", ["swarmnode", "1"], "copy", {"digits": 3}, 256]',
  'builtin/sum': '["2", "builtin/sum", ["swarmnode", "1"], "sum", {"terms": 2}, 256]'
}
export const versionOf = (id) => hex(hash(Buffer.from(VERSIONED[id]), 8))

const TASKS = {
  'builtin/copy': (address) => {
    const answer = digits('copy', address, 3).join('')
    return { prompt: `Copy ${answer}:`, answer, reward: (text) => inPlace([...text], [...answer]) }
  },
  'builtin/sum': (address) => {
    const numbers = digits('sum', address, 2)
    const answer = String(numbers[0] + numbers[1])
    return { prompt: numbers.join('+') + '=', answer, reward: (text) => text === answer ? 1 : 0 }
  }
}

const inPlace = (text, answer) => answer.filter((digit, i) => digit === text[i]).length / Math.max(text.length, answer.length)

// A question: {prompt, answer, reward: text → 0 to 1}, or null for an unknown task.
export function question ({ id, seed, index, difficulty }) {
  if (!Object.hasOwn(TASKS, id) || difficulty !== 0n) return null
  const { prompt, answer, reward } = TASKS[id](seed + index)
  const none = (text) => Buffer.byteLength(answerOf(text)) > 256 || (answerOf(text) !== text && !text.endsWith('</answer>'))
  return { prompt, answer, reward: (text) => none(text) ? 0 : reward(answerOf(text)) }
}

const WHITE = '[\\t-\\r\\u001c-\\u0020\\u0085\\u00a0\\u1680\\u2000-\\u200a\\u2028\\u2029\\u202f\\u205f\\u3000]'
const EDGES = new RegExp(`^${WHITE}+|${WHITE}+$`, 'g')

// The trimmed content of the last <answer>…</answer>, or else the whole text.
function answerOf (text) {
  const end = text.lastIndexOf('</answer>')
  const start = end < 0 ? -1 : text.slice(0, end).lastIndexOf('<answer>')
  return start < 0 ? text : text.slice(start + '<answer>'.length, end).replace(EDGES, '')
}

export function spread (rewards) {
  const mean = rewards.reduce((a, b) => a + b, 0) / rewards.length
  return Math.sqrt(rewards.reduce((sum, reward) => sum + (reward - mean) ** 2, 0) / rewards.length)
}

// 00, section 2: one msgpack value with exactly one encoding. A shape defines the expected value:
// 'str', 'bin', 'int' (a BigInt), 'float' (a number), choice(…), [element], row({field: shape}), {field: shape}, or tagged(…).
export class Refused extends Error {
  constructor (reason) {
    super(reason)
    this.reason = reason
  }
}

export const check = (condition, reason = 'bounds') => {
  if (!condition) throw new Refused(reason)
}
export const choice = (...texts) => ({ choice: texts })
export const row = (fields) => ({ row: fields })
export const tagged = (shapes) => ({ tagged: shapes })

const utf8 = new TextDecoder('utf-8', { fatal: true, ignoreBOM: true })
// Kind → [first lead with the length in it, greatest such length, first lead with a length behind it, log2 of that length's bytes].
const LENGTHS = { str: [0xa0, 0x1f, 0xd9, 0], bin: [0, -1, 0xc4, 0], array: [0x90, 0x0f, 0xdc, 1], map: [0x80, 0x0f, 0xde, 1] }

function kindOf (lead) {
  check(lead !== 0xc1, 'malformed')
  if (lead <= 0x7f || lead >= 0xe0 || (lead >= 0xcc && lead <= 0xd3)) return 'int'
  if (lead === 0xca || lead === 0xcb) return 'float'
  return Object.keys(LENGTHS).find((kind) => {
    const [fixed, most, first, log] = LENGTHS[kind]
    return (lead >= fixed && lead <= fixed + most) || (lead >= first && lead <= first + 2 - log)
  }) // else nil, bool, extensions
}

class Reader {
  constructor (data) {
    this.data = data
    this.view = new DataView(data.buffer, data.byteOffset, data.byteLength)
    this.at = 0
  }

  take (count) {
    check(count <= this.data.length - this.at, 'malformed')
    this.at += count
    return this.at - count
  }

  unsigned (bytes) {
    const at = this.take(bytes)
    return bytes === 8 ? this.view.getBigUint64(at) : bytes === 4 ? this.view.getUint32(at) : bytes === 2 ? this.view.getUint16(at) : this.data[at]
  }

  lead (wanted) {
    check(this.at < this.data.length, 'malformed')
    const found = kindOf(this.data[this.at])
    check(found === wanted || (wanted === 'float' && found === 'int'), 'schema') // an integer for a float fails the byte comparison
    return this.data[this.take(1)]
  }

  length (kind) {
    const [fixed, most, first, log] = LENGTHS[kind]
    const lead = this.lead(kind)
    return lead <= fixed + most && lead >= fixed ? lead - fixed : this.unsigned(1 << (lead - first + log))
  }

  bytes (kind) {
    const length = this.length(kind)
    const at = this.take(length)
    return this.data.slice(at, at + length)
  }

  text () {
    const bytes = this.bytes('str')
    try {
      return utf8.decode(bytes)
    } catch {
      throw new Refused('malformed')
    }
  }

  number (wanted) {
    const lead = this.lead(wanted)
    if (lead <= 0x7f) return BigInt(lead)
    if (lead >= 0xe0) return BigInt(lead - 0x100)
    if (lead === 0xca) return this.view.getFloat32(this.take(4))
    if (lead === 0xcb) return this.view.getFloat64(this.take(8))
    const size = 1 << ((lead - 0xcc) & 3)
    const found = BigInt(this.unsigned(size))
    return lead <= 0xcf ? found : BigInt.asIntN(8 * size, found)
  }

  value (shape) {
    if (shape === 'str') return this.text()
    if (shape === 'int') return this.number('int')
    if (shape === 'float') return Number(this.number('float'))
    if (shape === 'bin') return this.bytes('bin')
    if (Array.isArray(shape)) {
      const items = []
      for (let left = this.length('array'); left > 0; left--) items.push(this.value(shape[0])) // `take` rejects a count beyond the data
      return items
    }
    if (shape.choice) {
      const found = this.text()
      check(shape.choice.includes(found), 'schema')
      return found
    }
    if (shape.row) {
      const fields = Object.entries(shape.row)
      check(this.length('array') === fields.length, 'schema')
      return Object.fromEntries(fields.map(([field, inner]) => [field, this.value(inner)]))
    }
    const count = this.length('map')
    if (!shape.tagged) return this.fields(shape, count, {})
    check(count > 0 && this.text() === 'type', 'schema')
    const type = this.value(choice(...Object.keys(shape.tagged)))
    return this.fields(shape.tagged[type], count - 1, { type })
  }

  fields (shape, count, message) {
    for (let i = 0; i < count; i++) {
      const field = this.text()
      check(Object.hasOwn(shape, field), 'schema')
      message[field] = this.value(shape[field])
    }
    check(Object.keys(shape).every((field) => field in message), 'schema')
    return message
  }
}

function bigEndian (lead, value, size) {
  return Buffer.from([lead, ...Buffer.from(BigInt.asUintN(8 * size, BigInt(value)).toString(16).padStart(2 * size, '0'), 'hex')])
}

function header (kind, length) {
  const [fixed, most, first, log] = LENGTHS[kind]
  if (length <= most) return Buffer.from([fixed + length])
  const size = Math.max(log, length < 256 ? 0 : length < 65536 ? 1 : 2)
  return bigEndian(first + size - log, length, 1 << size)
}

function integer (value) {
  if (value >= -32n && value < 128n) return Buffer.from([Number(BigInt.asUintN(8, value))])
  const size = [0, 1, 2, 3].find((log) => value === (value >= 0n ? BigInt.asUintN(8 << log, value) : BigInt.asIntN(8 << log, value)))
  return bigEndian((value >= 0n ? 0xcc : 0xd0) + size, value, 1 << size)
}

function parts (shape, value) {
  if (shape === 'str' || shape.choice) return [header('str', Buffer.byteLength(value)), Buffer.from(value)]
  if (shape === 'bin') return [header('bin', value.length), value]
  if (shape === 'int') return [integer(BigInt(value))]
  if (shape === 'float') {
    const bytes = Buffer.alloc(9, 0xcb)
    bytes.writeDoubleBE(value, 1)
    return [bytes]
  }
  if (Array.isArray(shape)) return [header('array', value.length), ...value.flatMap((item) => parts(shape[0], item))]
  const fields = Object.entries(shape.row ?? (shape.tagged ? { type: 'str', ...shape.tagged[value.type] } : shape))
  const each = fields.flatMap(([name, inner]) => [...(shape.row ? [] : parts('str', name)), ...parts(inner, value[name])])
  return [header(shape.row ? 'array' : 'map', fields.length), ...each]
}

export const encode = (shape, value) => new Uint8Array(Buffer.concat(parts(shape, value)))

// The message in `data`, at most `limit` bytes of it. Throws Refused.
export function decode (data, limit, shape) {
  check(data.length <= limit, 'oversize')
  const message = new Reader(data).value(shape)
  // trailing bytes, duplicate keys, another order, longer headers than needed, integers and short floats for floats
  check(Buffer.compare(encode(shape, message), data) === 0, 'malformed')
  return message
}

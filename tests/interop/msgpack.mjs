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

function kindOf (lead) {
  check(lead !== 0xc1, 'malformed')
  if (lead <= 0x7f || lead >= 0xe0 || (lead >= 0xcc && lead <= 0xd3)) return 'int'
  if ((lead >= 0xa0 && lead <= 0xbf) || (lead >= 0xd9 && lead <= 0xdb)) return 'str'
  if (lead >= 0xc4 && lead <= 0xc6) return 'bin'
  if (lead === 0xca || lead === 0xcb) return 'float'
  if ((lead >= 0x90 && lead <= 0x9f) || lead === 0xdc || lead === 0xdd) return 'array'
  if ((lead >= 0x80 && lead <= 0x8f) || lead === 0xde || lead === 0xdf) return 'map'
  return 'other' // nil, bool, extensions
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

  length (kind, fixed, mask, first) {
    const lead = this.lead(kind)
    if (fixed !== null && lead >= fixed && lead <= fixed + mask) return lead - fixed
    return this.unsigned(1 << (lead - first))
  }

  text () {
    const length = this.length('str', 0xa0, 0x1f, 0xd9)
    const at = this.take(length)
    try {
      return utf8.decode(this.data.subarray(at, at + length))
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
    if (lead <= 0xcf) return BigInt(this.unsigned(1 << (lead - 0xcc)))
    const bytes = 1 << (lead - 0xd0)
    return BigInt.asIntN(8 * bytes, BigInt(this.unsigned(bytes)))
  }

  value (shape) {
    if (shape === 'str') return this.text()
    if (shape === 'int') return this.number('int')
    if (shape === 'float') return Number(this.number('float'))
    if (shape === 'bin') {
      const length = this.length('bin', null, 0, 0xc4)
      const at = this.take(length)
      return this.data.slice(at, at + length)
    }
    if (Array.isArray(shape)) {
      const items = []
      for (let left = this.arrayHeader(); left > 0; left--) items.push(this.value(shape[0])) // `take` rejects a count beyond the data
      return items
    }
    if (shape.choice) {
      const found = this.text()
      check(shape.choice.includes(found), 'schema')
      return found
    }
    if (shape.row) {
      const fields = Object.entries(shape.row)
      check(this.arrayHeader() === fields.length, 'schema')
      return Object.fromEntries(fields.map(([field, inner]) => [field, this.value(inner)]))
    }
    if (shape.tagged) {
      const count = this.mapHeader()
      check(count > 0 && this.text() === 'type', 'schema')
      const type = this.value(choice(...Object.keys(shape.tagged)))
      return this.fields(shape.tagged[type], count - 1, { type })
    }
    return this.fields(shape, this.mapHeader(), {})
  }

  arrayHeader () { return this.length('array', 0x90, 0x0f, 0xdb) }
  mapHeader () { return this.length('map', 0x80, 0x0f, 0xdd) }

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

const utf8Bytes = (text) => Buffer.from(text, 'utf8')

function header (length, fixed, mask, first) {
  if (fixed !== null && length <= mask) return Buffer.from([fixed + length])
  const bytes = Buffer.alloc(5)
  const size = first === 0xdb || first === 0xdd ? (length < 65536 ? 1 : 2) : length < 256 ? 0 : length < 65536 ? 1 : 2 // no 8-bit arrays and maps
  bytes[0] = first + size
  bytes.writeUIntBE(length, 1, 1 << size)
  return bytes.subarray(0, 1 + (1 << size))
}

function integer (value) {
  const bytes = Buffer.alloc(9)
  if (value >= -32n && value < 128n) return Buffer.from([Number(BigInt.asUintN(8, value))])
  for (let size = 0; size < 4; size++) {
    const bits = 8 << size
    if (value >= 0n ? BigInt.asUintN(bits, value) === value : BigInt.asIntN(bits, value) === value) {
      bytes[0] = (value >= 0n ? 0xcc : 0xd0) + size
      Buffer.from(BigInt.asUintN(bits, value).toString(16).padStart(bits / 4, '0'), 'hex').copy(bytes, 1)
      return bytes.subarray(0, 1 + (bits >> 3))
    }
  }
  throw new RangeError('an integer of more than 64 bits')
}

function parts (shape, value) {
  if (shape === 'str' || shape.choice) {
    const text = utf8Bytes(value)
    return [header(text.length, 0xa0, 0x1f, 0xd9), text]
  }
  if (shape === 'bin') return [header(value.length, null, 0, 0xc4), value]
  if (shape === 'int') return [integer(BigInt(value))]
  if (shape === 'float') {
    const bytes = Buffer.alloc(9, 0xcb)
    bytes.writeDoubleBE(value, 1)
    return [bytes]
  }
  if (Array.isArray(shape)) return [header(value.length, 0x90, 0x0f, 0xdb), ...value.flatMap((item) => parts(shape[0], item))]
  if (shape.row) {
    const fields = Object.entries(shape.row)
    return [header(fields.length, 0x90, 0x0f, 0xdb), ...fields.flatMap(([field, inner]) => parts(inner, value[field]))]
  }
  const fields = shape.tagged ? { type: 'str', ...shape.tagged[value.type] } : shape
  const names = Object.keys(fields)
  return [header(names.length, 0x80, 0x0f, 0xdd), ...names.flatMap((name) => [...parts('str', name), ...parts(fields[name], value[name])])]
}

export const encode = (shape, value) => new Uint8Array(Buffer.concat(parts(shape, value)))

// The message in `data`, at most `limit` bytes of it. Throws Refused.
export function decode (data, limit, shape) {
  check(data.length <= limit, 'oversize')
  const reader = new Reader(data)
  const message = reader.value(shape)
  // trailing bytes, duplicate keys, another order, longer headers than needed, integers and short floats for floats
  check(Buffer.compare(encode(shape, message), data) === 0, 'malformed')
  return message
}

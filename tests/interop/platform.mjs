// What js-libp2p expects of a newer Node than 20, and Node 18 does not have globally. Imported before it.
import { webcrypto } from 'node:crypto'

globalThis.crypto ??= webcrypto
globalThis.CustomEvent ??= class CustomEvent extends Event {
  constructor (type, options) {
    super(type, options)
    this.detail = options?.detail ?? null
  }
}
Promise.withResolvers ??= function () {
  let resolve, reject
  const promise = new this((...both) => { [resolve, reject] = both })
  return { promise, resolve, reject }
}

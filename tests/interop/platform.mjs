// Globals of newer Node versions that js-libp2p needs. Import this module before js-libp2p.
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

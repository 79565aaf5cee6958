"""NoLoCo: now and then a replica averages its weights with one random partner. Decisions and tensor maths; no socket, no model.

No torch (the network process imports these): rule, pairing, partners, throughput, layout, fragments, fingerprint, payload, manifest.
Torch (the trainer imports these): outer, gate, codecs, patches, lora.

Not here: streams and serving snapshots (they need `p2p`), when an inner step ends and what a held-out reward is (the trainer's), how long a
peer stays unwelcome (`p2p.reputation`; the gate only says who earned it).
"""

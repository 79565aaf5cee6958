"""The demo's Byzantine node: it joins like any other node and attacks each protocol.

    author     an author with a key that signs valid groups of rollouts
    frames     hostile groups: malformed, stolen, forged or oversized, each with the reason for
               which an honest node rejects it
    weights    a partner for averaging that sends no weights, or weights that are not finite,
               scaled, negated or of another shape
    listings   a holder that lists hostile groups as the most useful ones, and serves them
    __main__   the node: joins, does all of the above until it is killed, and floods its peers with
               requests

It uses real sockets and a real key, and no torch. Tests of admission use the same author and the
same attacks.
"""

"""The demo's liar: a node that joins like any other and then lies about everything that a peer can
lie about.

    author     a key, a stream of questions, and valid groups of rollouts, as an honest node would
    sign them
    frames     those groups made into lies: malformed, stolen, forged, too large, each with the
    reason that an honest node refuses it for
    weights    a partner for averaging that sends weights which are not finite, scaled, turned
    around, of another shape, or never
    listings   a holder that lists those lies as the best groups there are, and serves them
    __main__   the node: joins, does all of this until it is killed, floods its peers with requests

Real sockets and a real key, no torch. Tests of what a node refuses use the same author and the same
lies.
"""

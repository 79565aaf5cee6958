"""SAPO: groups, admission, the pool and sampling from it. No torch; only exchange.py and the parts
that it wires touch the network."""

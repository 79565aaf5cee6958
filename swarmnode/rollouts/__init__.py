"""SAPO: groups, admission, the pool and sampling from it. No torch; only exchange.py and fetching.py touch the network."""

"""In-memory network, in-process scorer and tiny policy for tests. tests/unit/p2p/test_api.py checks
that requests in memory behave like real ones."""

"""In-memory network, in-process scorer and tiny policy for tests. tests/unit/fakes and
tests/unit/p2p/test_api.py check that they behave like the real ones."""

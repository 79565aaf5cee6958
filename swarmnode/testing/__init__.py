"""Fakes for us and for users, each verified against the real thing by the same tests."""

"""Shared test tools: hosts, fakes, attackers and simulated swarms. Fakes for users' own tests are
in `tests.support.fakes`."""

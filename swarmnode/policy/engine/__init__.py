"""Sampling engines. An engine takes requests and returns groups of completions; weights may change
in between."""

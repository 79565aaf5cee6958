"""For tests of code that is built on swarmnode: an in-memory network, a scorer in this process, a
tiny policy. docs/testing.md."""

"""Encoding, decoding and validation of messages. Pure: no trio, torch or libp2p, and independent of
the use of rollouts."""

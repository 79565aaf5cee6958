"""The part of a crew in the network process: membership, and the streams between trainers."""

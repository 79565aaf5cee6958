"""The trainer process: generates, scores, updates, evaluates and saves the policy. It communicates
with the network process through `link/` only, and never with a peer."""

"""libp2p on trio: host, guards, identity, peers, requests, reputation. Knows nothing of
reinforcement learning."""

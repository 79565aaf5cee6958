"""libp2p on trio: host, guards, identity, peers, gossip, requests, reputation. Knows nothing of
reinforcement learning."""
